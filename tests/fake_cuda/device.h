// A CUDA device that is not there: what the parts of the extension share.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake {

// The same device serves under another name: torch's PrivateUse1, which an extension renames, as that of a real device.
inline const bool kIsNpu = std::getenv("FAKE_CUDA_KIND") == std::string("npu");
inline const c10::DeviceType kDevice = kIsNpu ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CUDA;
inline bool is_of_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

// [Note: Order] Kernels run at once, on the processor. What a real device may reorder is checked instead: each stream
// has a vector clock, which counts its own kernels and what it knows of other streams by events. Two accesses to one
// block of memory, of which one writes, must be ordered by these clocks. The host has a clock too: what it has waited
// for precedes all that it launches later.
using StreamId = int64_t;
using Clock = std::map<StreamId, int64_t>;

struct Event {
  Clock clock;       // of the stream, when the event was recorded
  StreamId stream = 0;
  double seconds = 0;
  int looks = 0;
};

constexpr StreamId kStreamsOfDevice = 1 << 16;
inline StreamId stream_key(int device, int64_t stream) { return device * kStreamsOfDevice + stream; }

int current_device();
void set_current_device(int device);
StreamId current_stream();  // of the current device

// Begins a kernel on a stream, and returns its place in the stream's clock.
int64_t launch(StreamId stream, const std::string& name, const std::vector<const void*>& reads,
               const std::vector<const void*>& writes);
void record(Event& event, StreamId stream);
void wait_on_stream(StreamId stream, const Event& event);
void wait_on_host(const Event& event);
void note_wait(const std::string& what);  // the host waits for the current device: all its streams are done

at::Tensor alias_on_cpu(const at::Tensor& tensor);  // the same memory as a tensor of the CPU
const void* block_of(const at::Tensor& tensor);     // the start of its memory
void poison(const at::Tensor& tensor);              // every byte becomes 0xFF: NaN, and -1

}  // namespace fake
