// What a CUDA build of torch has and its CPU wheel lacks, as far as fake CUDA tensors need it: a device guard that
// guards nothing (the wheel ends the process in their backward without one), and hooks that say there are two devices.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

constexpr c10::DeviceIndex NUM_DEVICES = 2;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  void block(void*, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // a CUDA build asks before it chooses an attention kernel; one so old is not chosen
  long versionCuDNN() const override { return 8000; }
  long versionRuntimeCuDNN() const override { return 8000; }
  void init() const override {}
};

Guard guard;

}  // namespace

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  // torch has asked for its hooks by now, and registers none later: ours take the place of those that say no
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
