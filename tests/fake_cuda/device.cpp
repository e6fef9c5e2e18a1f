// A CUDA device that is not there, for the CPU build of torch: real `cuda:N` tensors with memory of their own, whose
// kernels are those of the CPU. See __init__.py for what it shows.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace fake {

constexpr int kDevices = 16;      // of memory and generators; how many a process sees is said in cuda.py
constexpr int kLooksUntilDone = 3;  // an event is reached at so many looks, if nobody waits for it

// -- settings and counts --------------------------------------------------------------------------------

static std::atomic<int64_t> launches{0}, bytes_now{0}, bytes_peak{0}, bytes_most{INT64_MAX};
static std::atomic<int64_t> allocations[kDevices];
static std::atomic<bool> checks_order{false};
static double slow_s = 0;  // an event is reached so many seconds after it was recorded
static py::object* on_wait = nullptr;   // called with each wait of the host
static py::object* on_place = nullptr;  // gives the place of a kernel in the Python code
static auto& errors_lock = *new std::mutex;
static auto& errors = *new std::vector<std::string>;  // like all below: alive until the last tensor is freed

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void add_error(const std::string& error) {
  std::lock_guard<std::mutex> held(errors_lock);
  if (errors.size() < 100) errors.push_back(error);
}

static std::string place_of_kernel() {
  if (!on_place || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  return py::cast<std::string>((*on_place)());
}

// -- streams --------------------------------------------------------------------------------------------

static thread_local int device_at_hand = 0;
static thread_local int64_t stream_at_hand[kDevices] = {};
static std::atomic<int64_t> next_stream{1};
static auto& order_lock = *new std::recursive_mutex;
static auto& clocks = *new std::map<StreamId, Clock>;
static auto& host_clock = *new Clock;

int current_device() { return device_at_hand; }
void set_current_device(int device) { device_at_hand = device < 0 ? 0 : device; }
StreamId current_stream() { return stream_key(device_at_hand, stream_at_hand[device_at_hand]); }

static void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, at] : other) clock[stream] = std::max(clock[stream], at);
}

static bool knows(const Clock& clock, StreamId stream, int64_t at) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= at;
}

void record(Event& event, StreamId stream) {
  std::lock_guard<std::recursive_mutex> held(order_lock);
  merge(clocks[stream], host_clock);
  event.clock = clocks[stream];
  event.stream = stream;
  event.seconds = now();
  event.looks = 0;
}

void wait_on_stream(StreamId stream, const Event& event) {
  std::lock_guard<std::recursive_mutex> held(order_lock);
  merge(clocks[stream], event.clock);
}

// -- copies that arrive late ----------------------------------------------------------------------------

// A copy to pinned memory holds 0xFF until somebody looks at an event behind it or waits for one. A copy from pinned
// memory reads it only then, so its source must not change before.
struct LateCopy {
  StreamId stream;
  int64_t at;
  at::Tensor host, value;
  bool to_host;
};
static auto& late_copies = *new std::deque<LateCopy>;

static bool is_before(const LateCopy& copy, const Clock& clock) { return knows(clock, copy.stream, copy.at); }

static void finish(const LateCopy& copy) {
  if (copy.to_host) {
    copy.host.copy_(copy.value);
  } else if (copy.host.numel() && std::memcmp(copy.host.data_ptr(), copy.value.data_ptr(), copy.host.nbytes())) {
    add_error("pinned memory was written before the copy to the device that reads it was done");
  }
}

static void finish_copies(const Clock& clock) {
  std::vector<LateCopy> done;
  {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    for (auto each = late_copies.begin(); each != late_copies.end();) {
      if (is_before(*each, clock)) {
        done.push_back(*each);
        each = late_copies.erase(each);
      } else {
        ++each;
      }
    }
  }
  for (const auto& copy : done) finish(copy);
}

static bool is_of_last_launch(const Event& event) {
  std::lock_guard<std::recursive_mutex> held(order_lock);
  auto found = event.clock.find(event.stream);
  return found != event.clock.end() && found->second == clocks[event.stream][event.stream];
}

static bool is_reached(Event& event) {
  if (now() < event.seconds + slow_s) return false;
  bool is_open = false;
  {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    for (const auto& copy : late_copies) is_open |= is_before(copy, event.clock);
  }
  if (is_open && ++event.looks <= kLooksUntilDone) return false;
  wait_on_host(event);
  return true;
}

void wait_on_host(const Event& event) {
  {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    merge(host_clock, event.clock);
  }
  finish_copies(event.clock);
}

static void tell_wait(const std::string& what) {
  if (!on_wait || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(what);
}

void note_wait(const std::string& what) {
  Clock all;
  {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    for (const auto& [stream, clock] : clocks)
      if (stream / kStreamsOfDevice == device_at_hand) merge(all, clock);
    merge(host_clock, all);
  }
  finish_copies(all);
  tell_wait(what);
}

// -- memory ---------------------------------------------------------------------------------------------

struct Access {
  StreamId stream;
  int64_t at;
  std::string what;
};

struct Block {
  size_t bytes;
  int device;
  StreamId home;                 // the stream that gets it back
  std::set<StreamId> recorded;   // by record_stream
  std::vector<Access> reads, writes;  // writes has the last one, if any
};
static auto& blocks = *new std::unordered_map<const void*, Block>;

static std::string told(const Access& access) {
  std::ostringstream text;
  text << access.what << " on stream " << access.stream % kStreamsOfDevice;
  return text.str();
}

static void check_access(const Block& block, const Clock& clock, const Access& access, bool is_write) {
  auto check = [&](const Access& before, const char* did) {
    if (knows(clock, before.stream, before.at)) return;
    add_error(told(access) + (is_write ? " writes" : " reads") + " memory that " + told(before) + " " + did +
              ", and does not wait for it");
  };
  for (const auto& before : block.writes) check(before, "writes");
  if (is_write)
    for (const auto& before : block.reads) check(before, "reads");
}

int64_t launch(StreamId stream, const std::string& name, const std::vector<const void*>& reads,
               const std::vector<const void*>& writes) {
  launches++;
  std::string place = checks_order ? place_of_kernel() : "";
  std::lock_guard<std::recursive_mutex> held(order_lock);
  Clock& clock = clocks[stream];
  merge(clock, host_clock);
  int64_t at = ++clock[stream];
  if (!checks_order) return at;
  Access access{stream, at, place.empty() ? name : name + " (" + place + ")"};
  for (const void* start : reads) {
    auto found = blocks.find(start);
    if (found == blocks.end()) continue;
    check_access(found->second, clock, access, false);
    found->second.reads.push_back(access);
  }
  for (const void* start : writes) {
    auto found = blocks.find(start);
    if (found == blocks.end()) continue;
    check_access(found->second, clock, access, true);
    found->second.reads.clear();
    found->second.writes.assign(1, access);
  }
  return at;
}

static void check_freed(const Block& block) {
  Clock known = clocks[block.home];
  merge(known, host_clock);
  auto check = [&](const Access& access) {
    if (access.stream == block.home || block.recorded.count(access.stream)) return;
    if (knows(known, access.stream, access.at)) return;
    add_error("memory is given back to stream " + std::to_string(block.home % kStreamsOfDevice) + " while " +
              told(access) + " uses it; record_stream or a wait is missing");
  };
  for (const auto& access : block.reads) check(access);
  for (const auto& access : block.writes) check(access);
}

struct DeviceAllocator final : c10::Allocator {
  static void give_back(void* start) {
    size_t bytes = 0;
    {
      std::lock_guard<std::recursive_mutex> held(order_lock);
      auto found = blocks.find(start);
      if (checks_order) check_freed(found->second);
      bytes = found->second.bytes;
      blocks.erase(found);
    }
    bytes_now -= bytes;
    std::memset(start, 0xFF, bytes);
    std::free(start);
  }
  c10::DataPtr allocate(size_t asked) override {
    size_t bytes = asked ? asked : 1;
    if (bytes_now + (int64_t)bytes > bytes_most) {
      std::ostringstream text;
      text << "CUDA out of memory. Tried to allocate " << bytes << " bytes. GPU " << device_at_hand
           << " has a total capacity of " << bytes_most << " bytes";
      TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
    }
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 256, bytes) == 0, "the host has no memory left for the fake device");
    std::memset(start, 0xFF, bytes);  // NaN and -1: nothing may rely on what new memory holds
    bytes_now += bytes;
    bytes_peak = std::max(bytes_peak.load(), bytes_now.load());
    allocations[device_at_hand]++;
    std::lock_guard<std::recursive_mutex> held(order_lock);
    blocks[start] = {bytes, device_at_hand, current_stream(), {}, {}, {}};
    return {start, start, &give_back, c10::Device(kDevice, (c10::DeviceIndex)device_at_hand)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static DeviceAllocator device_allocator;

static auto& pinned_lock = *new std::mutex;
static auto& pinned = *new std::map<const char*, size_t>;
static std::atomic<int64_t> pinned_now{0}, pinned_peak{0};

struct PinnedAllocator final : c10::Allocator {
  static void give_back(void* start) {
    {
      std::lock_guard<std::mutex> held(pinned_lock);
      auto found = pinned.find(static_cast<const char*>(start));
      pinned_now -= found->second;
      pinned.erase(found);
    }
    std::free(start);
  }
  c10::DataPtr allocate(size_t asked) override {
    void* start = nullptr;
    size_t bytes = asked ? asked : 1;
    TORCH_CHECK(posix_memalign(&start, 64, bytes) == 0, "the host has no memory left to pin");
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned[static_cast<const char*>(start)] = bytes;
    pinned_now += bytes;
    pinned_peak = std::max(pinned_peak.load(), pinned_now.load());
    return {start, start, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;

static bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

// -- what torch asks of a kind of device ----------------------------------------------------------------

struct OnDevice {
  int before;
  explicit OnDevice(int device) : before(device_at_hand) {
    if (device >= 0) device_at_hand = device;
  }
  ~OnDevice() { device_at_hand = before; }
};

static c10::Stream as_stream(c10::Device device, int64_t stream) {
  return c10::Stream(c10::Stream::UNSAFE, device, stream);
}
static StreamId key_of(const c10::Stream& stream) { return stream_key(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return {kDevice, (c10::DeviceIndex)index}; }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device other) const override {
    auto before = device(device_at_hand);
    set_current_device(other.index());
    return before;
  }
  c10::Device getDevice() const override { return device(device_at_hand); }
  void setDevice(c10::Device other) const override { set_current_device(other.index()); }
  void uncheckedSetDevice(c10::Device other) const noexcept override { set_current_device(other.index()); }
  c10::Stream getStream(c10::Device d) const override { return as_stream(d, stream_at_hand[std::max<int>(0, d.index())]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return as_stream(d, next_stream++); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return as_stream(d.has_index() ? d : device(device_at_hand), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto& at_hand = stream_at_hand[std::max<int>(0, other.device_index())];
    auto before = as_stream(other.device(), at_hand);
    at_hand = other.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    fake::record(*static_cast<Event*>(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on_stream(key_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& recorded = *static_cast<Event*>(event);
    bool is_last = is_of_last_launch(recorded), is_done = is_reached(recorded);
    if (is_last) tell_wait("event.query of the last launch");
    return is_done;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    Event event;
    fake::record(event, key_of(stream));
    event.looks = kLooksUntilDone;
    return is_reached(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Event event;
    fake::record(event, key_of(stream));
    wait_on_host(event);
    tell_wait("stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& recorded = *static_cast<Event*>(event);
    bool is_last = is_of_last_launch(recorded);
    double left = recorded.seconds + slow_s - now();
    if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
    wait_on_host(recorded);
    tell_wait("event.synchronize");
    if (is_last) tell_wait("event.synchronize of the last launch");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { note_wait("device.synchronize"); }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return 1000 * (static_cast<Event*>(last)->seconds - static_cast<Event*>(first)->seconds);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    auto found = blocks.find(memory.get());
    if (found != blocks.end()) found->second.recorded.insert(key_of(stream));
  }
};
static Guard guard;

static at::Generator& generator_of(int device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> found;
    for (int each = 0; each < kDevices; each++) found.push_back(at::detail::createCPUGenerator(1234));
    return found;
  }();
  return made[device < 0 ? device_at_hand : device];
}

template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device = -1) const override { return generator_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void* start) const override {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    auto found = blocks.find(start);
    return Guard::device(found == blocks.end() ? device_at_hand : found->second.device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)device_at_hand; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override { note_wait("device.synchronize"); }
};

struct NpuHooks final : Hooks<at::PrivateUse1HooksInterface> {
  bool isBuilt() const override { return true; }
};

// -- tensors --------------------------------------------------------------------------------------------

const void* block_of(const at::Tensor& tensor) { return tensor.has_storage() ? tensor.storage().data() : nullptr; }

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  auto memory = c10::DataPtr(const_cast<void*>(tensor.storage().data()), kept,
                             [](void* it) { delete static_cast<c10::Storage*>(it); }, c10::Device(c10::kCPU));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                             tensor.storage().nbytes(), std::move(memory),
                                                             c10::GetCPUAllocator(), true));
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  auto* inside = made.unsafeGetTensorImpl();
  inside->set_storage_offset(tensor.storage_offset());
  inside->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

void poison(const at::Tensor& tensor) {
  auto alias = alias_on_cpu(tensor);
  if (alias.numel()) std::memset(alias.data_ptr(), 0xFF, alias.nbytes());
}

static const c10::DispatchKey kKey = kIsNpu ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CUDA;
static c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(kKey); }

static at::Tensor on_device(c10::Storage storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), device_keys(), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

static c10::Storage moved_to_device(const at::Tensor& fresh) {
  size_t bytes = fresh.storage().nbytes();
  auto memory = device_allocator.allocate(bytes);
  if (bytes) std::memcpy(memory.get(), fresh.storage().data(), bytes);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            std::move(memory), &device_allocator, true));
}

// -- kernels --------------------------------------------------------------------------------------------

// Results whose size or value the host must know: the host waits for the device.
static const std::unordered_set<std::string> kReads = {
    "aten::equal",          "aten::is_nonzero", "aten::nonzero",           "aten::masked_select",
    "aten::bincount",       "aten::_unique2",   "aten::repeat_interleave", "aten::unique_consecutive",
    "aten::unique_dim"};
// These take indices on the host, which torch copies to the device.
static const std::unordered_set<std::string> kIndexed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                         "aten::index_put", "aten::_unsafe_index"};
static const std::unordered_set<std::string> kViews = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::view_as_real",
    "aten::view_as_complex", "aten::unfold", "aten::set_"};

struct Aliases {
  std::vector<std::pair<at::Tensor, at::Tensor>> made;  // a tensor of the device, and its alias on the CPU
  std::vector<const void*> reads, writes;
  std::string host_shape;
  bool has_host = false;
  int device = -1;

  at::Tensor of(const at::Tensor& tensor, bool is_written, const std::string& name) {
    if (!tensor.defined()) return tensor;
    if (!is_of_device(tensor)) {
      if (tensor.dim() > 0) {
        std::ostringstream text;
        text << tensor.sizes();
        host_shape = text.str();
        has_host = true;
      }
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and cuda:", (int)tensor.device().index(), "! (", name, ")");
    device = tensor.device().index();
    made.emplace_back(tensor, alias_on_cpu(tensor));
    (is_written ? writes : reads).push_back(block_of(tensor));
    return made.back().second;
  }

  // A kernel may have resized what it was given to write.
  void take_over_resizes() {
    for (auto& [tensor, alias] : made) {
      bool is_moved = alias.storage().data() != tensor.storage().data();
      if (!is_moved && alias.sizes() == tensor.sizes() && alias.strides() == tensor.strides()) continue;
      if (is_moved) {
        auto storage = moved_to_device(alias);
        auto* inside = tensor.storage().unsafeGetStorageImpl();
        auto bytes = storage.nbytes();
        inside->set_data_ptr_noswap(std::move(storage.unsafeGetStorageImpl()->mutable_data_ptr()));
        inside->set_nbytes(bytes);
      }
      tensor.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [tensor, alias] : made)
      if (alias.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return tensor;
    for (auto& [tensor, alias] : made)
      if (result.has_storage() && result.storage().nbytes() && alias.storage().data() == result.storage().data())
        return on_device(tensor.storage(), result);
    return on_device(moved_to_device(result), result);
  }
};

static bool is_foreach(const std::string& name) { return name.rfind("aten::_foreach_", 0) == 0; }

// torch's own kernels for many tensors count their writes themselves: the dispatcher does so for single tensors alone.
static void count_writes(at::TensorList tensors) {
  for (const auto& tensor : tensors)
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Every kernel of the device without one of its own: that of the CPU, on the same memory.
static void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (kReads.count(name)) note_wait(name);
  Aliases aliases;
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t each = 0; each < arguments.size(); each++) {
    auto& value = (*stack)[begin + each];
    const auto* alias_info = arguments[each].alias_info();
    bool is_written = alias_info && alias_info->isWrite();
    if (value.isTensor()) {
      value = aliases.of(value.toTensor(), is_written, name);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      if (is_written && is_foreach(name)) count_writes(list);
      for (auto& tensor : list) tensor = aliases.of(tensor, is_written, name);
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& one : value.toOptionalTensorList()) {
        std::optional<at::Tensor> tensor = one;
        if (tensor.has_value()) tensor = aliases.of(*tensor, is_written, name);
        list.push_back(tensor);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      if (aliases.device < 0) aliases.device = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    } else if (value.isNone() && arguments[each].type()->str() == "Generator?") {
      value = generator_of(aliases.device);
    }
  }
  bool is_mixed = aliases.has_host && !aliases.made.empty();
  TORCH_CHECK(!is_mixed || kIndexed.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", aliases.device,
              " and cpu! (", name, " ", aliases.host_shape, ")");
  if (is_mixed) note_wait(name + " with an index on the host");
  OnDevice on(aliases.device);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.take_over_resizes();
  std::vector<at::Tensor> results;
  for (size_t each = stack->size() - schema.returns().size(); each < stack->size(); each++) {
    auto& value = (*stack)[each];
    if (value.isTensor()) {
      value = aliases.back(value.toTensor());
      results.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = aliases.back(tensor);
      results.insert(results.end(), list.begin(), list.end());
      value = c10::List<at::Tensor>(list);
    }
  }
  if (kViews.count(name)) return;
  for (const auto& result : results)
    if (result.defined() && is_of_device(result)) aliases.writes.push_back(block_of(result));
  launch(current_stream(), name, aliases.reads, aliases.writes);
}

static at::Tensor empty_of(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  OnDevice on(device.has_value() ? device->index() : -1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, device_keys(),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

static at::Tensor empty_strided_of(c10::SymIntArrayRef size, c10::SymIntArrayRef strides,
                                   std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                   std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device.has_value() ? device->index() : -1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides),
                                           &device_allocator, device_keys(),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

static at::Tensor& copy_of(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool to_host = to.is_cpu() && is_of_device(from);
  bool to_device = is_of_device(to) && from.is_cpu();
  const at::Tensor& host = to_host ? to : from;
  bool is_late = non_blocking && (to_host || to_device) && is_pinned(block_of(host)) && host.is_contiguous();
  OnDevice on(is_of_device(to) ? to.device().index() : from.device().index());
  at::Tensor target = is_of_device(to) ? alias_on_cpu(to) : to;
  at::Tensor source = is_of_device(from) ? alias_on_cpu(from) : from;
  std::vector<const void*> reads, writes;
  if (is_of_device(from)) reads.push_back(block_of(from));
  if (is_of_device(to)) writes.push_back(block_of(to));
  std::string name = to_host ? "copy to the host" : to_device ? "copy to the device" : "copy_";
  StreamId stream = current_stream();
  int64_t at = launch(stream, name, reads, writes);
  if (is_late && to_host) {
    auto value = at::empty_like(target);
    value.copy_(source);
    std::memset(target.data_ptr(), 0xFF, target.nbytes());
    std::lock_guard<std::recursive_mutex> held(order_lock);
    late_copies.push_back({stream, at, target, value, true});
    return to;
  }
  if (is_late && from.numel()) {
    std::lock_guard<std::recursive_mutex> held(order_lock);
    late_copies.push_back({stream, at, from, from.clone(), false});
  }
  target.copy_(source);
  // A copy from pageable memory is staged: torch's own check of waits does not count it if it is not blocking.
  bool waits = (to_host && !is_late) || (to_device && !non_blocking);
  if (waits) note_wait(to_host && non_blocking ? "copy to pageable memory" : name);
  return to;
}

static at::Scalar read_of(const at::Tensor& tensor) {
  launch(stream_key(tensor.device().index(), stream_at_hand[tensor.device().index()]), "aten::_local_scalar_dense",
         {block_of(tensor)}, {});
  OnDevice on(tensor.device().index());
  note_wait("aten::_local_scalar_dense");
  return at::_local_scalar_dense(alias_on_cpu(tensor));
}

static void foreach_copy_of(at::TensorList to, at::TensorList from, bool non_blocking) {
  if (to.empty()) return;
  bool is_one_launch = true;  // as torch's kernel: one dtype on each side, which may differ, and the same strides
  for (size_t each = 0; each < to.size(); each++)
    is_one_launch &= is_of_device(to[each]) && is_of_device(from[each]) && to[each].dtype() == to[0].dtype() &&
                     from[each].dtype() == from[0].dtype() && to[each].device() == from[0].device() &&
                     to[each].strides() == from[each].strides() && to[each].is_non_overlapping_and_dense();
  if (!is_one_launch) {
    for (size_t each = 0; each < to.size(); each++) {
      at::Tensor target = to[each];
      target.copy_(from[each], non_blocking);
    }
    return;
  }
  std::vector<const void*> reads, writes;
  for (size_t each = 0; each < to.size(); each++) {
    reads.push_back(block_of(from[each]));
    writes.push_back(block_of(to[each]));
    alias_on_cpu(to[each]).copy_(alias_on_cpu(from[each]));
  }
  count_writes(to);
  OnDevice on(to[0].device().index());
  launch(current_stream(), "aten::_foreach_copy_", reads, writes);
}

// It has no argument for a generator: the CPU's kernel would draw from the host's, not from the device's.
static std::tuple<at::Tensor, at::Tensor> dropout_of(const at::Tensor& values, double share, std::optional<bool> trains) {
  if (!trains.value_or(true)) return {values.clone(), at::ones_like(values, at::kBool)};
  auto mask = at::empty_like(values, at::kBool).bernoulli_(1 - share);
  return {values.mul(mask).mul_(share == 1 ? 0 : 1 / (1 - share)), mask};
}

static void record_stream_of(at::Tensor& tensor, c10::Stream stream) {
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

static at::Tensor& set_place_of(at::Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                                c10::SymIntArrayRef strides) {
  auto* inside = tensor.unsafeGetTensorImpl();
  inside->set_storage_keep_dtype(std::move(storage));
  inside->set_storage_offset(offset.expect_int());
  if (strides.empty())
    inside->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else
    inside->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
  return tensor;
}

static at::Tensor& set_storage_of(at::Tensor& tensor, c10::Storage storage) {
  c10::SymInt size((int64_t)(storage.nbytes() / tensor.dtype().itemsize()));
  return set_place_of(tensor, std::move(storage), 0, size, {});
}

static void add_kernels() {
  static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  static torch::Library m(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  m.impl("empty.memory_format", &empty_of);
  m.impl("empty_strided", &empty_strided_of);
  m.impl("copy_", &copy_of);
  m.impl("_local_scalar_dense", &read_of);
  m.impl("_foreach_copy_", &foreach_copy_of);
  m.impl("native_dropout", &dropout_of);
  m.impl("record_stream", &record_stream_of);
  m.impl("set_.source_Storage", &set_storage_of);
  m.impl("set_.source_Storage_storage_offset", &set_place_of);
  // Without these torch takes its slow ways, a kernel for each tensor or step of a formula, before any fallback: other
  // bits than the CPU's, for a transposed convolution no kernel at all, for a loss a warning of an output's size.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm",
                           "silu_backward", "mish_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_foreach(op.name) || op.name == "aten::_foreach_copy_" || op.name == "aten::_foreach_mm") continue;
    std::string name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

void add_nccl(py::module& m);  // nccl.cpp

}  // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake;
  c10::SetAllocator(kDevice, &device_allocator, 1);
  if (kIsNpu) {
    at::RegisterPrivateUse1HooksInterface(new NpuHooks());
  } else {
    auto** hooks = (const at::CUDAHooksInterface**)dlsym(RTLD_DEFAULT, "fake_cuda_hooks");
    TORCH_CHECK(hooks, "preloaded.so must be in LD_PRELOAD");
    *hooks = new CudaHooks();
  }
  add_kernels();
  static c10::impl::DeviceGuardImplRegistrar registered(kDevice, &guard);
  m.def("device", [] { return device_at_hand; });
  m.def("set_device", [](int device) { set_current_device(device); });
  m.def("generator", [](int device) { return generator_of(device); });
  m.def("synchronize", [] { note_wait("torch.cuda.synchronize"); });
  m.def("launches", [] { return launches.load(); });
  m.def("allocations", [] {
    std::vector<int64_t> found;
    for (auto& each : allocations) found.push_back(each);
    return found;
  });
  m.def("memory", [] { return std::make_pair(bytes_now.load(), bytes_peak.load()); });
  m.def("pinned_memory", [] { return std::make_pair(pinned_now.load(), pinned_peak.load()); });
  m.def("reset_peak", [] {
    bytes_peak = bytes_now.load();
    pinned_peak = pinned_now.load();
  });
  m.def("limit_memory", [](int64_t bytes) { bytes_most = bytes; });
  m.def("slow_down", [](double seconds) { slow_s = seconds; });
  m.def("check_order", [](bool is_on) { checks_order = is_on; });
  m.def("errors", [] {
    std::lock_guard<std::mutex> held(errors_lock);
    auto found = errors;
    errors.clear();
    return found;
  });
  m.def("on_wait", [](py::object call) { on_wait = call.is_none() ? nullptr : new py::object(call); });
  m.def("on_place", [](py::object call) { on_place = call.is_none() ? nullptr : new py::object(call); });
  m.def("is_pinned", [](int64_t address) { return is_pinned((void*)address); });
  m.def("alias", &alias_on_cpu);
  m.def("is_on_device", &is_of_device);
  add_nccl(m);
}
