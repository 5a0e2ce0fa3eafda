#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <unordered_map>

#include "alias.h"
#include "memory.h"
#include "streams.h"

namespace async_cpu {

namespace {

// A number of Python's decides the dtype of a result less than a tensor does.
void copy_number_flag(const at::Tensor& target, const at::Tensor& source) {
  if (source.unsafeGetTensorImpl()->is_wrapped_number()) {
    target.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kCPU).requires_grad(std::nullopt));
  copy_number_flag(alias, tensor);
  return alias;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;  // a meta kernel in Python reads it
  }
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                tensor.options().device(at::kMeta).pinned_memory(std::nullopt));
  copy_number_flag(meta, tensor);
  return meta;
}

at::Tensor device_like(const at::Tensor& tensor, int device) {
  const c10::Device where(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(where).pinned_memory(std::nullopt));
}

namespace {

using torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// An argument or a result with each defined tensor changed.
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) {
      list.push_back(each.defined() ? change(each) : each);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      list.push_back(each && each->defined() ? std::optional(change(*each)) : each);
    }
    return list;
  }
  return value;
}

void for_each(const Stack& values, const std::function<void(const at::Tensor&)>& use) {
  for (const c10::IValue& value : values) {
    changed(value, [&](const at::Tensor& tensor) {
      use(tensor);
      return tensor;
    });
  }
}

// What the dispatcher and this file must know of an operator.
struct Facts {
  bool has_results = false;     // tensors that are none of the arguments
  bool has_outputs = false;     // `out=` arguments, which may have to be resized
  bool needs_host = false;      // its result is no tensor, or has sizes that depend on data
  bool draws = false;           // random numbers, by other ways than a generator argument
};

bool is_tensor_type(const c10::TypePtr& type) {
  if (auto list = type->cast<c10::ListType>()) {
    return is_tensor_type(list->getElementType());
  }
  if (auto optional = type->cast<c10::OptionalType>()) {
    return is_tensor_type(optional->getElementType());
  }
  return type->kind() == c10::TypeKind::TensorType;
}

Facts new_facts_of(const c10::OperatorHandle& op) {
  Facts facts;
  bool has_generator = false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    facts.has_outputs |= argument.is_out();
    has_generator |= argument.name() == "generator";
  }
  for (const c10::Argument& result : op.schema().returns()) {
    const auto* alias = result.alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || alias->isWrite(), op.operator_name(),
                                " returns a view; it needs a kernel of its own for this device.");
    facts.has_results |= alias == nullptr;
    facts.needs_host |= !is_tensor_type(result.type());
  }
  for (const at::Tag tag : op.getTags()) {
    facts.needs_host |= tag == at::Tag::data_dependent_output;
    facts.needs_host |= tag == at::Tag::dynamic_output_shape;
    facts.draws |= tag == at::Tag::nondeterministic_seeded && !has_generator;
  }
  return facts;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Facts> known;
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second
                              : known.emplace(&op.schema(), new_facts_of(op)).first->second;
}

// The device of the arguments. Host tensors may be scalars, or indices, as with CUDA.
int device_of_arguments(const c10::OperatorHandle& op, const Stack& arguments) {
  int device = -1;
  const bool indexes = op.schema().name().find("index") != std::string::npos;
  for_each(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || indexes), op.operator_name(),
                  " got a tensor of ", tensor.sizes(), " on ", tensor.device(),
                  " beside tensors of the asynchronous device; move it there.");
      return;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index(), op.operator_name(),
                " got tensors of devices ", device, " and ", int{tensor.device().index()},
                "; move them to one.");
    device = tensor.device().index();
  });
  return device < 0 ? current_device() : device;
}

// The arguments for the CPU kernel: aliases, values of host tensors, and a generator of its own.
Stack cpu_arguments(const c10::OperatorHandle& op, const Stack& arguments, int device) {
  Stack changed_arguments;
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto& argument = op.schema().arguments()[index];
    const bool may_draw = argument.name() == "generator";
    if (may_draw) {
      const auto& given = arguments[index];
      at::Generator source = given.isNone() ? default_generator(device) : given.toGenerator();
      std::lock_guard<std::mutex> lock(source.mutex());
      TORCH_CHECK(source.device().is_privateuseone(), op.operator_name(), " got a generator on ",
                  source.device(), ", expected one of the asynchronous device");
      const uint64_t seed = source.get<at::CPUGeneratorImpl>()->random64();
      changed_arguments.emplace_back(at::detail::createCPUGenerator(seed));
    } else if (arguments[index].isDevice()) {
      changed_arguments.emplace_back(c10::Device(at::kCPU));
    } else {
      changed_arguments.push_back(changed(arguments[index], [](const at::Tensor& tensor) {
        if (!tensor.is_cpu()) {
          return alias_of(tensor);
        }
        auto value = tensor.clone();
        copy_number_flag(value, tensor);
        return value;
      }));
    }
  }
  return changed_arguments;
}

// Statistics have the dtype of the parameters on the CPU, where CUDA's are in fp32.
void correct_statistics(const c10::OperatorHandle& op, const Stack& arguments, Stack& results) {
  const auto& name = op.schema().name();
  const bool is_layer_norm = name == "aten::native_layer_norm";
  if (!is_layer_norm && name != "aten::native_group_norm") {
    return;
  }
  const at::Tensor& input = arguments[0].toTensor();
  const c10::IValue& weight = arguments[is_layer_norm ? 2 : 1];
  const auto dtype = weight.isTensor() && weight.toTensor().defined()
                         ? weight.toTensor().scalar_type()
                         : input.scalar_type();
  for (size_t index = 1; index < results.size(); ++index) {
    results[index] = results[index].toTensor().to(dtype);
  }
}

// Results as the meta kernel gives them, or none if there is no meta kernel for this call.
std::optional<Stack> meta_results(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return std::nullopt;
  }
  Stack stack;
  for (const c10::IValue& value : arguments) {
    stack.push_back(value.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : changed(value, meta_of));
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  correct_statistics(op, arguments, stack);
  return stack;
}

// The argument that a result is, by the schema's alias annotations.
c10::IValue aliased(const c10::OperatorHandle& op, const c10::Argument& result,
                    const Stack& arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto* alias = op.schema().arguments()[index].alias_info();
    if (alias != nullptr && *alias == *result.alias_info()) {
      return arguments[index];
    }
  }
  TORCH_INTERNAL_ASSERT(false, op.operator_name(), " has a result that is no argument");
}

// Gives `out=` arguments the sizes that the meta kernel found.
void resize_outputs(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results) {
  for (size_t index = 0; index < results.size(); ++index) {
    const c10::Argument& result = op.schema().returns()[index];
    if (result.alias_info() == nullptr || !results[index].isTensor()) {
      continue;
    }
    const at::Tensor& out = aliased(op, result, arguments).toTensor();
    if (out.sizes() != results[index].toTensor().sizes()) {
      out.resize_(results[index].toTensor().sizes());
    }
  }
}

bool has_empty_output(const c10::OperatorHandle& op, const Stack& arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (op.schema().arguments()[index].is_out() && arguments[index].isTensor() &&
        arguments[index].toTensor().numel() == 0) {
      return true;
    }
  }
  return false;
}

void copy_result(const c10::IValue& target, const c10::IValue& source) {
  std::vector<at::Tensor> targets, sources;
  for_each({target}, [&](const at::Tensor& each) { targets.push_back(each); });
  for_each({source}, [&](const at::Tensor& each) { sources.push_back(each); });
  TORCH_CHECK(targets.size() == sources.size(), "a kernel gave another number of results");
  for (size_t index = 0; index < targets.size(); ++index) {
    TORCH_CHECK(targets[index].sizes() == sources[index].sizes(), "a kernel gave ",
                sources[index].sizes(), " where its meta kernel gave ", targets[index].sizes());
    targets[index].copy_(sources[index]);
  }
}

const char* name_of(const c10::OperatorHandle& op) { return op.schema().name().c_str(); }

// Queues the CPU kernel; `fresh` are aliases of the results that are none of the arguments.
void queue_kernel(const c10::OperatorHandle& op, Stack arguments, Stack fresh, int device) {
  current_queue(device).put(
      name_of(op), [op, arguments = std::move(arguments), fresh = std::move(fresh)]() mutable {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        op.callBoxed(&arguments);
        size_t next = 0;
        for (size_t index = 0; index < arguments.size(); ++index) {
          if (op.schema().returns()[index].alias_info() == nullptr) {
            copy_result(fresh[next++], arguments[index]);
          }
        }
      });
}

// Runs the CPU kernel now, after all that the current stream holds.
Stack run_now(const c10::OperatorHandle& op, const Stack& arguments, int device, bool for_host) {
  Stack stack = cpu_arguments(op, arguments, device);
  if (for_host) {
    await_for_host(device);
  } else {
    await(current_queue(device).end());
  }
  op.callBoxed(&stack);
  for (size_t index = 0; index < stack.size(); ++index) {
    if (op.schema().returns()[index].alias_info() != nullptr) {
      continue;
    }
    stack[index] = changed(stack[index], [&](const at::Tensor& value) {
      auto result = device_like(value, device);
      current_queue(device).put("result", [target = alias_of(result), value] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        target.copy_(value);
      });
      return result;
    });
  }
  return stack;
}

Stack run_later(const c10::OperatorHandle& op, const Stack& arguments, const Stack& metas,
                int device) {
  Stack results, fresh;
  for (size_t index = 0; index < op.schema().returns().size(); ++index) {
    const c10::Argument& result = op.schema().returns()[index];
    if (result.alias_info() != nullptr) {
      results.emplace_back();
      continue;
    }
    results.push_back(changed(
        metas.at(index), [&](const at::Tensor& meta) { return device_like(meta, device); }));
    fresh.push_back(changed(results.back(), alias_of));
  }
  queue_kernel(op, cpu_arguments(op, arguments, device), std::move(fresh), device);
  return results;
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  // Meta kernels and CPU kernels run as they are, whatever is tracing this call.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const Stack arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  const Facts& facts = facts_of(op);
  const int device = device_of_arguments(op, arguments);
  std::optional<Stack> metas;
  const bool asks = facts.has_results || (facts.has_outputs && has_empty_output(op, arguments));
  if (!facts.needs_host && !facts.draws) {
    metas = asks ? meta_results(op, arguments) : Stack();
  }
  if (metas && facts.has_outputs && asks) {
    resize_outputs(op, arguments, *metas);
  }
  Stack results = metas ? run_later(op, arguments, *metas, device)
                        : run_now(op, arguments, device, facts.needs_host);
  for (size_t index = 0; index < results.size(); ++index) {
    const c10::Argument& result = op.schema().returns()[index];
    stack->push_back(result.alias_info() != nullptr ? aliased(op, result, arguments)
                                                    : std::move(results[index]));
  }
}

}  // namespace async_cpu
