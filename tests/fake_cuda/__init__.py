"""A CUDA device that is not there, for the CPU build of torch.

A process that is started with `environment(...)` has real `cuda:N` tensors: `is_cuda` is true, torch takes its own
branches for CUDA, and storages lie in memory of their own. The kernels are those of the CPU. "nccl" is a backend that
sums by gloo on copies.

[Note: What it shows]
* Each operation after which the host waits for the device is noted with its place: a read of a value, a blocking copy,
  an index on the host, `synchronize`.
* Copies to pinned memory arrive late: they hold 0xFF, which is NaN and -1, until a later event is looked at some
  times or waited for. A copy from pinned memory reads it as late, so an early write to it is an error.
* Kernels run at once, and their order is checked by vector clocks, as torch.cuda._sanitizer does on a real device. An
  access to memory that another stream uses, without a wait between them, is an error that names both kernels. So is
  memory given back while another stream uses it, without `record_stream`.
* New and freed memory holds 0xFF. The output of an NCCL operation does so until `wait`, which lets the stream wait for
  it. NCCL refuses what the real one refuses: tensors of the host, with gaps, of other dtypes.
* NCCL ends the process at its own timeout unless that is longer than the host's. It has connections of its own, closes
  idle ones where a setting says so, and warns under NCCL_DEBUG=WARN if somebody else has shut one.
* Tensors of two devices in one operation raise. Launches, the allocations on each device, and pinned bytes are
  counted. A limit of memory raises torch.OutOfMemoryError.

[Note: What it cannot show] Speed, the caching allocator's fragments, the watchdog and the sockets of the real NCCL,
CUDA graphs, torch.compile, and bits of a GPU's kernels. docs/benchmarks/fake_gpu.md lists what only a real GPU shows.
"""
