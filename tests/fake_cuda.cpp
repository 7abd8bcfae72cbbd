// The parts of a CUDA build of torch that fake CUDA tensors need and the CPU wheel lacks.
// The device guard does nothing. Without one, the backward pass of fake CUDA tensors ends the process.
// The hooks report two devices.
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
  // Torch reads the cuDNN version before it chooses an attention kernel. It does not choose cuDNN of this old version.
  long versionCuDNN() const override { return 8000; }
  long versionRuntimeCuDNN() const override { return 8000; }
  void init() const override {}
};

Guard guard;

}  // namespace

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  // Torch has created its hooks, which report no CUDA, and never replaces them. So these hooks overwrite that object.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
