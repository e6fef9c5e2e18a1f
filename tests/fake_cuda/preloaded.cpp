// Comes before libtorch_cpu in the order in which symbols are looked up: torch then asks the fake device's hooks.
#include <cstdint>
#include <dlfcn.h>
#include <optional>

extern "C" const void* fake_cuda_hooks;
const void* fake_cuda_hooks = nullptr;  // set by the extension

namespace c10 {
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };
}

namespace at {
struct CUDAHooksInterface;

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
bool isAccelerator(c10::DeviceType kind) { return kind == c10::DeviceType::CUDA; }
}  // namespace accelerator

namespace detail {
const CUDAHooksInterface& getCUDAHooks() {
  if (fake_cuda_hooks) return *static_cast<const CUDAHooksInterface*>(fake_cuda_hooks);
  using Getter = const CUDAHooksInterface& (*)();
  static auto torchs = reinterpret_cast<Getter>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), "_ZN2at6detail12getCUDAHooksEv"));
  return torchs();
}
}  // namespace detail
}  // namespace at
