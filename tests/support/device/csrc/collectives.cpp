#include "collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include "alias.h"
#include "streams.h"

namespace async_cpu {

namespace {

using c10d::OpType;
using c10d::ReduceOp;

// A collective in flight, or one that is over.
class Handle final : public c10d::Work {
 public:
  Handle(int rank, OpType type, Point end, Tensors tensors, bool for_host)
      : Work(rank, type), end_(end), tensors_(std::move(tensors)), for_host_(for_host) {}

  bool isCompleted() override { return reached(end_); }
  bool isSuccess() const override { return true; }

  void synchronize() override {
    if (end_.queue != nullptr) {
      current_queue(end_.queue->device).put_wait(end_);
    }
    tensors_.clear();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (for_host_ || timeout != kNoTimeout) {
      await(end_);
    }
    return true;
  }

  std::vector<at::Tensor> result() override { return tensors_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto stream = stream_of(*end_.queue);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{stream.device()});
    const c10::StreamGuard guard(stream);
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  const Point end_;
  Tensors tensors_;  // kept until somebody waits
  const bool for_host_;
};

Tensors aliases_of(const Tensors& tensors) {
  Tensors aliases;
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(alias_of(tensor));
  }
  return aliases;
}

std::vector<Tensors> aliases_of(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (const Tensors& tensors : lists) {
    aliases.push_back(aliases_of(tensors));
  }
  return aliases;
}

Tensors together(Tensors all, const std::vector<Tensors>& lists) {
  for (const Tensors& tensors : lists) {
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

at::Tensor flat(const Tensors& tensors) {
  Tensors lines;
  for (const at::Tensor& tensor : tensors) {
    lines.push_back(tensor.reshape({-1}));
  }
  return at::cat(lines);
}

// A reduction by gloo's operators, with what NCCL's do beside.
struct Reduction {
  ReduceOp op;
  int size;

  ReduceOp gloo() const {
    return op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op;
  }

  // What is to be added up: as NCCL, an average multiplies floating numbers before the sum.
  at::Tensor before(const at::Tensor& value) const {
    if (op == ReduceOp::AVG && value.is_floating_point()) {
      return value * (1.0 / size);
    }
    if (op == ReduceOp::PREMUL_SUM) {
      const auto* factor = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      return factor->tensor_factor.defined() ? value * alias_of(factor->tensor_factor)
                                             : value * factor->double_factor;
    }
    return value;
  }

  void after(const at::Tensor& sum) const {
    if (op == ReduceOp::AVG && !sum.is_floating_point()) {
      sum.floor_divide_(size);
    }
  }
};

Body reducing(Reduction reduction, at::Tensor alias,
              std::function<WorkPtr(c10d::Backend&, Tensors&, ReduceOp)> start) {
  return [=](c10d::Backend& gloo) -> WorkPtr {
    Tensors values{reduction.before(alias)};
    start(gloo, values, reduction.gloo())->wait();
    reduction.after(values[0]);
    if (!values[0].is_same(alias)) {
      alias.copy_(values[0]);
    }
    return nullptr;
  };
}

// As NCCL, these look at the elements alone. Gloo also compares the sizes.
Body scattering(Reduction reduction, at::Tensor output, at::Tensor input) {
  return [=](c10d::Backend& gloo) -> WorkPtr {
    at::Tensor sum = output.view({-1}), given = reduction.before(input.view({-1}));
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduction.gloo();
    gloo._reduce_scatter_base(sum, given, options)->wait();
    reduction.after(sum);
    return nullptr;
  };
}

Body gathering(at::Tensor output, at::Tensor input) {
  return [=](c10d::Backend& gloo) -> WorkPtr {
    at::Tensor all = output.view({-1}), own = input.view({-1});
    gloo._allgather_base(all, own)->wait();
    return nullptr;
  };
}

}  // namespace

Collectives::Collectives(int rank, int size, MakeGloo make)
    : Backend(rank, size), make_(std::move(make)) {}

c10::intrusive_ptr<c10d::Backend> Collectives::gloo_of(Queue& queue) {
  auto found = gloos_.find(&queue);
  if (found == gloos_.end()) {
    found = gloos_.emplace(&queue, make_(static_cast<int>(gloos_.size()))).first;
  }
  return found->second;
}

void Collectives::startCoalescing() {
  coalesced_ = Launch{"c10d::coalesced", OpType::COALESCED, false, {}, {}};
}

WorkPtr Collectives::endCoalescing() {
  Launch all = std::move(*coalesced_);
  coalesced_.reset();
  return queue(std::move(all));
}

WorkPtr Collectives::launch(Launch launch) {
  if (!coalesced_) {
    return queue(std::move(launch));
  }
  coalesced_->async_op |= launch.async_op;
  coalesced_->tensors = together(std::move(coalesced_->tensors), {launch.tensors});
  for (Body& body : launch.bodies) {
    coalesced_->bodies.push_back(std::move(body));
  }
  return c10::make_intrusive<Handle>(getRank(), launch.type, Point(), Tensors(), false);
}

WorkPtr Collectives::queue(Launch launch) {
  ++launched_;
  int device = current_device();
  for (const at::Tensor& tensor : launch.tensors) {
    TORCH_CHECK(tensor.is_privateuseone(), launch.name, " got a tensor on ", tensor.device(),
                ", expected one of the asynchronous device");
    device = tensor.device().index();
  }
  Queue& current = current_queue(device);
  Queue*& own = own_[device];
  if (own == nullptr) {
    own = &queue_of(new_stream(device, true));
  }
  Queue& used = launch.async_op ? *own : current;
  const auto gloo = gloo_of(used);
  used.put_wait(current.end());
  const Point end = used.put(launch.name, [gloo, bodies = std::move(launch.bodies)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<WorkPtr> begun;
    for (const Body& body : bodies) {
      begun.push_back(body(*gloo));
    }
    for (const WorkPtr& work : begun) {
      if (work) {
        work->wait();
      }
    }
  });
  // What a collective of the current stream uses is freed in the order of that stream.
  Tensors kept = launch.async_op ? std::move(launch.tensors) : Tensors();
  return c10::make_intrusive<Handle>(getRank(), launch.type, end, std::move(kept),
                                     launch.type == OpType::BARRIER);
}

WorkPtr Collectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto body = [aliases = aliases_of(tensors), options](c10d::Backend& gloo) -> WorkPtr {
    Tensors values = aliases;
    gloo.broadcast(values, options)->wait();
    return nullptr;
  };
  return launch({"c10d::broadcast", OpType::BROADCAST, options.asyncOp, tensors, {body}});
}

WorkPtr Collectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  std::vector<Body> bodies;
  for (const at::Tensor& tensor : tensors) {
    bodies.push_back(reducing({options.reduceOp, getSize()}, alias_of(tensor),
                              [](c10d::Backend& gloo, Tensors& values, ReduceOp op) {
                                c10d::AllreduceOptions of_gloo;
                                of_gloo.reduceOp = op;
                                return gloo.allreduce(values, of_gloo);
                              }));
  }
  return launch({"c10d::allreduce", OpType::ALLREDUCE, options.asyncOp, tensors, bodies});
}

WorkPtr Collectives::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr Collectives::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto body = reducing({options.reduceOp, getSize()}, alias_of(tensors.at(0)),
                       [options](c10d::Backend& gloo, Tensors& values, ReduceOp op) {
                         c10d::ReduceOptions of_gloo = options;
                         of_gloo.reduceOp = op;
                         return gloo.reduce(values, of_gloo);
                       });
  return launch({"c10d::reduce", OpType::REDUCE, options.asyncOp, tensors, {body}});
}

WorkPtr Collectives::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  auto body = [all = aliases_of(outputs), own = aliases_of(inputs)](c10d::Backend& gloo) -> WorkPtr {
    auto targets = all;
    auto sources = own;
    gloo.allgather(targets, sources)->wait();
    return nullptr;
  };
  return launch({"c10d::allgather", OpType::ALLGATHER, options.asyncOp, together(inputs, outputs),
                 {body}});
}

WorkPtr Collectives::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  return launch({"c10d::allgather_into_tensor", OpType::_ALLGATHER_BASE, options.asyncOp,
                 {output, input}, {gathering(alias_of(output), alias_of(input))}});
}

WorkPtr Collectives::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  std::vector<Body> bodies;
  for (size_t index = 0; index < outputs.size(); ++index) {
    bodies.push_back(gathering(alias_of(outputs[index]), alias_of(inputs[index])));
  }
  return launch({"c10d::allgather_coalesced", OpType::ALLGATHER_COALESCED, options.asyncOp,
                 together(inputs, {outputs}), bodies});
}

WorkPtr Collectives::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& options) {
  auto body = [all = aliases_of(outputs), own = aliases_of(inputs),
               options](c10d::Backend& gloo) -> WorkPtr {
    auto targets = all;
    auto sources = own;
    gloo.gather(targets, sources, options)->wait();
    return nullptr;
  };
  return launch({"c10d::gather", OpType::GATHER, options.asyncOp, together(inputs, outputs),
                 {body}});
}

WorkPtr Collectives::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& options) {
  auto body = [own = aliases_of(outputs), all = aliases_of(inputs),
               options](c10d::Backend& gloo) -> WorkPtr {
    auto targets = own;
    auto sources = all;
    gloo.scatter(targets, sources, options)->wait();
    return nullptr;
  };
  return launch({"c10d::scatter", OpType::SCATTER, options.asyncOp, together(outputs, inputs),
                 {body}});
}

WorkPtr Collectives::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const Reduction reduction{options.reduceOp, getSize()};
  auto body = [reduction, output = alias_of(outputs.at(0)),
               parts = aliases_of(inputs.at(0))](c10d::Backend& gloo) {
    return scattering(reduction, output, flat(parts))(gloo);
  };
  return launch({"c10d::reduce_scatter", OpType::REDUCE_SCATTER, options.asyncOp,
                 together(outputs, inputs), {body}});
}

WorkPtr Collectives::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  const Reduction reduction{options.reduceOp, getSize()};
  return launch({"c10d::reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, options.asyncOp,
                 {output, input}, {scattering(reduction, alias_of(output), alias_of(input))}});
}

WorkPtr Collectives::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  std::vector<Body> bodies;
  for (size_t index = 0; index < outputs.size(); ++index) {
    bodies.push_back(scattering({options.reduceOp, getSize()}, alias_of(outputs[index]),
                                alias_of(inputs[index])));
  }
  return launch({"c10d::reduce_scatter_coalesced", OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                 options.asyncOp, together(inputs, {outputs}), bodies});
}

WorkPtr Collectives::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  auto body = [target = alias_of(output), source = alias_of(input), output_sizes,
               input_sizes](c10d::Backend& gloo) -> WorkPtr {
    at::Tensor written = target, read = source;
    auto to = output_sizes, from = input_sizes;
    gloo.alltoall_base(written, read, to, from)->wait();
    return nullptr;
  };
  return launch({"c10d::alltoall_base", OpType::ALLTOALL_BASE, options.asyncOp, {output, input},
                 {body}});
}

WorkPtr Collectives::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& options) {
  auto body = [targets = aliases_of(outputs), sources = aliases_of(inputs)](
                  c10d::Backend& gloo) -> WorkPtr {
    std::vector<int64_t> to, from;
    for (const at::Tensor& target : targets) {
      to.push_back(target.numel());
    }
    for (const at::Tensor& source : sources) {
      from.push_back(source.numel());
    }
    at::Tensor read = flat(sources), written = at::empty_like(flat(targets));
    const auto sizes = to;  // gloo takes those that it is given
    gloo.alltoall_base(written, read, to, from)->wait();
    const auto parts = written.split_with_sizes(sizes);
    for (size_t index = 0; index < targets.size(); ++index) {
      targets[index].copy_(parts[index].view(targets[index].sizes()));
    }
    return nullptr;
  };
  return launch({"c10d::alltoall", OpType::ALLTOALL, options.asyncOp, together(inputs, {outputs}),
                 {body}});
}

WorkPtr Collectives::send(Tensors& tensors, int target, int tag) {
  auto body = [aliases = aliases_of(tensors), target, tag](c10d::Backend& gloo) {
    Tensors values = aliases;
    return gloo.send(values, target, tag);
  };
  return launch({"c10d::send", OpType::SEND, true, tensors, {body}});
}

WorkPtr Collectives::recv(Tensors& tensors, int source, int tag) {
  auto body = [aliases = aliases_of(tensors), source, tag](c10d::Backend& gloo) {
    Tensors values = aliases;
    return gloo.recv(values, source, tag);
  };
  return launch({"c10d::recv", OpType::RECV, true, tensors, {body}});
}

WorkPtr Collectives::barrier(const c10d::BarrierOptions&) {
  auto body = [](c10d::Backend& gloo) -> WorkPtr {
    gloo.barrier()->wait();
    return nullptr;
  };
  return launch({"c10d::barrier", OpType::BARRIER, true, {}, {body}});
}

}  // namespace async_cpu
