// The operators that are no kernels: they allocate, copy between devices, or change metadata only.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "alias.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"

namespace async_cpu {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device checked_device(std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors are supported");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "only memory of the host can be pinned");
  return c10::device_or_default(device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(checked_device(layout, device, pin_memory));
  return at::detail::empty_generic(size, &device_memory(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  const c10::DeviceGuard guard(checked_device(layout, device, pin_memory));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Lets the storage hold what the sizes of a tensor need.
void grow(const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() != 0 && needed > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  grow(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  grow(self);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  auto* memory = &device_memory();
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, memory, true), 0, {0},
                     {});
}

void queue_copy(Queue& queue, const at::Tensor& target, const at::Tensor& source) {
  queue.put("copy", [target, source] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  });
}

void record_pinned(const at::Tensor& host, Queue& queue) {
  record_pinned_use(host.const_data_ptr(), queue.end());
}

void copy_between_devices(const at::Tensor& target, const at::Tensor& source) {
  Queue& queue = current_queue(source.device().index());
  Queue& other = current_queue(target.device().index());
  queue.put_wait(other.end());
  queue_copy(queue, alias_of(target), alias_of(source));
  other.put_wait(queue.end());
}

void copy_to_host(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const int device = source.device().index();
  Queue& queue = current_queue(device);
  queue_copy(queue, alias_of(target), alias_of(source));
  if (non_blocking && is_pinned(target.const_data_ptr())) {
    record_pinned(target, queue);
  } else {
    await_for_host(device);
  }
}

void copy_from_host(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const int device = target.device().index();
  Queue& queue = current_queue(device);
  if (!non_blocking) {
    queue_copy(queue, alias_of(target), alias_of(source));
    await_for_host(device);
  } else if (is_pinned(source.const_data_ptr())) {
    queue_copy(queue, alias_of(target), alias_of(source));
    record_pinned(source, queue);
  } else {
    queue_copy(queue, alias_of(target), source.clone());  // staged: the caller may write it again
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (self.is_same(source) || self.numel() == 0) {
    return self;
  }
  const at::Tensor given = source.expand(self.sizes()).resolve_conj().resolve_neg();
  if (self.is_privateuseone() && given.is_privateuseone()) {
    if (self.device() == given.device()) {
      queue_copy(current_queue(self.device().index()), alias_of(self), alias_of(given));
    } else {
      copy_between_devices(self, given);
    }
  } else if (given.is_privateuseone()) {
    TORCH_CHECK(self.is_cpu(), "cannot copy to ", self.device());
    copy_to_host(self, given, non_blocking);
  } else {
    TORCH_CHECK(given.is_cpu(), "cannot copy from ", given.device());
    copy_from_host(self, given, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor written = target;
  return copy_(written, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  await_for_host(self.device().index());
  return at::_local_scalar_dense(alias_of(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  const auto given = offset ? std::optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), given);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

// Attention by its definition. The fused kernels are of other devices.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const OptionalTensor&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  // Torch would compose these of others for a device that it does not know.
  // Losses with `out=` resize it in between.
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution",
                           "convolution_backward", "mse_loss", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace async_cpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &async_cpu::fused_sdp_choice)
}
