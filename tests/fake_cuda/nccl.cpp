// Backends for tensors of the fake device: "nccl", which sums by gloo on copies, and gloo as a CUDA build has it.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <sstream>

namespace fake {

constexpr int64_t kCommunication = (1 << 16) - 1;  // the stream of NCCL's kernels

static auto& log_lock = *new std::mutex;
static auto& log = *new std::vector<std::string>;

static py::object* on_connect = nullptr;  // opens the sockets that NCCL has

static void add_to_log(const std::string& line) {
  std::lock_guard<std::mutex> held(log_lock);
  log.push_back(line);
}

// What NCCL's watchdog does by default once its own timeout is over.
[[noreturn]] static void end_process() {
  std::fputs("[E] Watchdog caught collective operation timeout. To avoid data inconsistency, we are taking the entire "
             "process down.\n",
             stderr);
  std::abort();
}

// An operation on NCCL's stream: its output holds NaN until `wait`, which orders the current stream behind it.
struct DeviceWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> host_work;
  bool ends_process = false;  // NCCL's own timeout comes first
  std::vector<at::Tensor> outputs, values, kept;  // values: what the outputs will hold, on the host
  Event done;
  bool is_done = false;

  DeviceWork(int rank, c10d::OpType kind, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> to,
             std::vector<at::Tensor> from, std::vector<at::Tensor> alive)
      : c10d::Work(rank, kind), host_work(std::move(work)), outputs(std::move(to)), values(std::move(from)),
        kept(std::move(alive)) {}

  bool isCompleted() override { return host_work->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (is_done) return true;
    try {
      host_work->wait(timeout);
    } catch (const std::exception& error) {
      if (ends_process && std::string(error.what()).find("imed out") != std::string::npos) end_process();
      throw;
    }
    for (size_t each = 0; each < outputs.size(); each++) {
      auto alias = alias_on_cpu(outputs[each]);
      alias.copy_(values[each].view_as(alias));
    }
    wait_on_stream(current_stream(), done);
    is_done = true;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs; }
  // What torch's DDP waits for. A real future is complete at once, with an event on NCCL's stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{outputs[0].device()});
    future->markCompleted(at::IValue(outputs));
    return future;
  }
};

static const std::set<at::ScalarType> kTypes = {at::kChar, at::kByte,  at::kBool,   at::kInt,    at::kLong,
                                                at::kHalf, at::kFloat, at::kDouble, at::kBFloat16};

// The gloo below an aborted backend, until its sums have ended: its destructor waits for them, as NCCL's does not.
struct Aborted {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
};
static auto& aborted = *new std::vector<Aborted>;

static void drop_ended(std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  works.erase(std::remove_if(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); }), works.end());
}

// gloo's destructor waits for its threads, and those wait for the GIL where a sum that a backward began holds Python's
// context. torch's own bindings let the GIL go too; DDP's Reducer, which may hold the last reference, does not.
static void drop_without_gil(c10::intrusive_ptr<c10d::Backend>& gloo) {
  std::optional<py::gil_scoped_release> without_gil;
  if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
  gloo.reset();
}

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
  uint64_t sequence = 0;  // of the collectives so far
  bool is_patient = false;  // its timeout is longer than the host's, which gloo below has
  Nccl(c10::intrusive_ptr<c10d::Backend> below, int rank, int size)
      : c10d::Backend(rank, size), gloo(std::move(below)) {}
  ~Nccl() override { drop_without_gil(gloo); }

  const std::string getBackendName() const override { return kIsNpu ? "hccl" : "nccl"; }
  bool supportsSplitting() const override { return false; }
  void eagerConnectSingleDevice(at::Device) override {
    add_to_log("connect");
    if (!on_connect) return;
    py::gil_scoped_acquire gil;
    (*on_connect)();
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void abort() override {
    add_to_log("abort");
    for (auto& each : aborted) drop_ended(each.under_way);
    aborted.erase(std::remove_if(aborted.begin(), aborted.end(), [](auto& each) { return each.under_way.empty(); }),
                  aborted.end());
    if (!under_way.empty()) aborted.push_back({gloo, std::move(under_way)});
    under_way.clear();
  }
  void shutdown() override { add_to_log("shutdown"); }

  static void require(const at::Tensor& tensor, const char* what) {
    TORCH_CHECK(is_of_device(tensor), "NCCL: Tensors must be CUDA and dense, in ", what);
    TORCH_CHECK(tensor.is_contiguous(), "NCCL: Tensors must be contiguous, in ", what);
    TORCH_CHECK(kTypes.count(tensor.scalar_type()), "Input tensor data type is not supported for NCCL process group: ",
                tensor.scalar_type(), ", in ", what);
  }

  // A copy on the host; low precisions are summed in float32 and rounded at the end, as NCCL's rings nearly do.
  static at::Tensor host_copy(const at::Tensor& tensor, bool widens) {
    auto copy = alias_on_cpu(tensor).clone();
    bool is_low = copy.scalar_type() == at::kBFloat16 || copy.scalar_type() == at::kHalf;
    return widens && is_low ? copy.to(at::kFloat) : copy;
  }

  c10::intrusive_ptr<c10d::Work> start(const char* what, c10d::OpType kind, std::vector<at::Tensor> inputs,
                                       std::vector<at::Tensor> outputs, std::vector<at::Tensor> values,
                                       std::vector<at::Tensor> alive,
                                       const std::function<c10::intrusive_ptr<c10d::Work>()>& run) {
    std::vector<const void*> reads, writes;
    std::ostringstream line;
    line << what;
    for (const auto& input : inputs) {
      require(input, what);
      reads.push_back(block_of(input));
      line << " " << input.scalar_type() << " " << input.numel();
    }
    for (const auto& output : outputs) {
      require(output, what);
      writes.push_back(block_of(output));
    }
    add_to_log(line.str());
    sequence++;
    auto work = run();
    drop_ended(under_way);
    under_way.push_back(work);
    Event before;
    StreamId stream = stream_key(current_device(), kCommunication);
    record(before, current_stream());
    wait_on_stream(stream, before);
    launch(stream, std::string("NCCL ") + what, reads, writes);
    auto made = c10::make_intrusive<DeviceWork>(rank_, kind, work, outputs, values, alive);
    made->ends_process = !is_patient;
    record(made->done, stream);
    for (const auto& output : outputs) poison(output);
    return made;
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    require(tensors[0], "all-reduce");
    std::vector<at::Tensor> values{host_copy(tensors[0], true)};
    return start("all-reduce", c10d::OpType::ALLREDUCE, tensors, tensors, values, {},
                 [&] { return gloo->allreduce(values, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<at::Tensor> values;
    for (const auto& tensor : tensors) {
      require(tensor, "all-reduce");
      values.push_back(host_copy(tensor, true));
    }
    return start("all-reduce", c10d::OpType::ALLREDUCE, tensors, tensors, values, {},
                 [&] { return gloo->allreduce_coalesced(values, options); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    require(tensors[0], "broadcast");
    std::vector<at::Tensor> values{host_copy(tensors[0], false)};
    return start("broadcast", c10d::OpType::BROADCAST, tensors, tensors, values, {},
                 [&] { return gloo->broadcast(values, options); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    require(input, "all-gather");
    require(output, "all-gather");
    auto value = alias_on_cpu(output).clone();
    auto part = host_copy(input, false);
    return start("all-gather", c10d::OpType::_ALLGATHER_BASE, {input}, {output}, {value}, {part},
                 [&] { return gloo->_allgather_base(value, part, options); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    require(inputs[0], "all-gather");
    std::vector<std::vector<at::Tensor>> values(1);
    for (const auto& output : outputs[0]) values[0].push_back(alias_on_cpu(output).clone());
    std::vector<at::Tensor> parts{host_copy(inputs[0], false)};
    return start("all-gather", c10d::OpType::ALLGATHER, inputs, outputs[0], values[0], parts,
                 [&] { return gloo->allgather(values, parts, options); });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& from_each,
                                               std::vector<int64_t>& to_each,
                                               const c10d::AllToAllOptions& options) override {
    require(input, "all-to-all");
    require(output, "all-to-all");
    auto value = alias_on_cpu(output).clone();
    auto part = host_copy(input, false);
    return start("all-to-all", c10d::OpType::ALLTOALL_BASE, {input}, {output}, {value}, {part},
                 [&] { return gloo->alltoall_base(value, part, from_each, to_each, options); });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return gloo->barrier(options);
  }
};

// gloo with tensors of the device, as a CUDA build has it: copied to the host and back by threads of its own.
struct HostWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> below;
  std::vector<at::Tensor> outputs, values, kept;
  bool is_done = false;
  HostWork(int rank, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> to, std::vector<at::Tensor> from,
           std::vector<at::Tensor> alive)
      : c10d::Work(rank, c10d::OpType::UNKNOWN), below(std::move(work)), outputs(std::move(to)),
        values(std::move(from)), kept(std::move(alive)) {}
  bool isCompleted() override { return below->isCompleted(); }
  bool isSuccess() const override { return below->isSuccess(); }
  std::exception_ptr exception() const override { return below->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (is_done) return true;
    below->wait(timeout);
    for (size_t each = 0; each < outputs.size(); each++) {
      at::Tensor output = outputs[each];
      output.copy_(values[each].view_as(output), true);
    }
    is_done = true;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { below->abort(); }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{outputs[0].device()});
    future->markCompleted(at::IValue(outputs));
    return future;
  }
};

struct Gloo final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> below;
  Gloo(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), below(std::move(gloo)) {}
  ~Gloo() override { drop_without_gil(below); }
  const std::string getBackendName() const override { return "gloo"; }
  void setSequenceNumberForGroup() override { below->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return below->getSequenceNumberForGroup(); }
  void abort() override { below->abort(); }
  void shutdown() override { below->shutdown(); }
  void setTimeout(std::chrono::milliseconds timeout) override { below->setTimeout(timeout); }

  static at::Tensor copied(const at::Tensor& tensor) {
    launch(current_stream(), "gloo's copy to the host", {block_of(tensor)}, {});
    return alias_on_cpu(tensor).clone();
  }
  static std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> found;
    for (const auto& tensor : tensors) found.push_back(copied(tensor));
    return found;
  }
  c10::intrusive_ptr<c10d::Work> made(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> outputs,
                                      std::vector<at::Tensor> values, std::vector<at::Tensor> alive = {}) {
    return c10::make_intrusive<HostWork>(rank_, work, outputs, values, alive);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    if (!is_of_device(tensors[0])) return below->allreduce(tensors, options);
    auto values = on_host(tensors);
    return made(below->allreduce(values, options), tensors, values);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override {
    if (!is_of_device(tensors[0])) return below->allreduce_coalesced(tensors, options);
    auto values = on_host(tensors);
    return made(below->allreduce_coalesced(values, options), tensors, values);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    if (!is_of_device(tensors[0])) return below->broadcast(tensors, options);
    auto values = on_host(tensors);
    return made(below->broadcast(values, options), tensors, values);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    if (!is_of_device(inputs[0])) return below->allgather(outputs, inputs, options);
    std::vector<std::vector<at::Tensor>> values{on_host(outputs[0])};
    auto parts = on_host(inputs);
    return made(below->allgather(values, parts, options), outputs[0], values[0], parts);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    if (!is_of_device(input)) return below->_allgather_base(output, input, options);
    auto value = copied(output);
    auto part = copied(input);
    return made(below->_allgather_base(value, part, options), {output}, {value}, {part});
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& from_each,
                                               std::vector<int64_t>& to_each,
                                               const c10d::AllToAllOptions& options) override {
    if (!is_of_device(input)) return below->alltoall_base(output, input, from_each, to_each, options);
    auto value = copied(output);
    auto part = copied(input);
    return made(below->alltoall_base(value, part, from_each, to_each, options), {output}, {value}, {part});
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return below->send(tensors, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return below->recv(tensors, from, tag);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return below->barrier(options);
  }
};

// What torch's DDP measures its steps with, on the device's clock; it waits for nothing.
struct DdpTimer final : c10d::Timer {
  explicit DdpTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimeRef(start), last = getTimeRef(end);
    if (first == c10d::kUnsetTime || last < first) return std::nullopt;
    return last - first;
  }
};

void add_nccl(py::module& m) {
  // As torch's own has it: a method of the subclass.
  py::class_<Nccl, c10::intrusive_ptr<Nccl>>(m, "Nccl", py::module::import("torch._C._distributed_c10d").attr("Backend"))
      .def("_set_default_timeout", [](Nccl& self, std::chrono::milliseconds timeout) {
        self.is_patient = true;
        add_to_log("timeout " + std::to_string(timeout.count()) + " ms");
      });
  m.def("on_connect", [](py::object call) { on_connect = call.is_none() ? nullptr : new py::object(call); });
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::make_intrusive<Nccl>(gloo, rank, size);
  });
  m.def("nccl_log", [] {
    std::lock_guard<std::mutex> held(log_lock);
    auto found = log;
    log.clear();
    return found;
  });
  // Its own `options` are those of the gloo below, which Python sets.
  py::class_<Gloo, c10::intrusive_ptr<Gloo>>(m, "Gloo", py::module::import("torch._C._distributed_c10d").attr("Backend"),
                                             py::dynamic_attr());
  m.def("gloo", [](c10::intrusive_ptr<c10d::Backend> below, int rank, int size) {
    return c10::make_intrusive<Gloo>(below, rank, size);
  });
}

}  // namespace fake

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, fake::DdpTimer);
}  // namespace c10d
