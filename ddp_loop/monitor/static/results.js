// The second tab: a table of the runs' parameters and results, and their pictures.
//
// The page imports whatever this module exports. A class Results is made once, when the first run with parameters is
// there, as new Results(place, page), where place is the section of the tab and page has:
//   wire              requests, see wire.js
//   open(key)         opens a run's card
//   only(keys)        draws the curves of these runs and of no others
//   choose(key, on)   draws a run's curves, or no longer
//   colour(key)       a CSS colour, or null where the run is not drawn
//   notice(text)      shows an error above the panes
// While the tab is open, results.show(runs, {order, chosen}) is called after each event and each change of the list:
// runs maps keys to summaries, order has the keys that the search finds in the order of the list, chosen is the set of
// keys whose curves are wanted.
export {};
