// A process group of the asynchronous device: gloo moves the bytes, on streams, as NCCL does.
//
// An asynchronous collective runs on a stream of the process group. A synchronous one runs on the
// current stream. `wait` of a handle makes the current stream wait, and not the host. A handle that
// is dropped orders nothing and keeps nothing.
//
// Each stream has a gloo group of its own. So collectives of two streams have no order at all, which
// is stricter than NCCL, where those of one communicator follow each other.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <unordered_map>

#include "queue.h"

namespace async_cpu {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
// Runs in the stream. What it returns is waited for when its collective, or all of a coalesced
// launch, have begun.
using Body = std::function<WorkPtr(c10d::Backend& gloo)>;

class Collectives final : public c10d::Backend {
 public:
  using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>(int)>;

  // `make` gives the gloo group of a number; all ranks call it for the same numbers in turn.
  Collectives(int rank, int size, MakeGloo make);

  const std::string getBackendName() const override { return "asyncgloo"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return launched_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int target, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Launch {
    const char* name;
    c10d::OpType type;
    bool async_op;
    Tensors tensors;  // what it reads and writes
    std::vector<Body> bodies;
  };

  // Queues a collective, or keeps it for the end of coalescing.
  WorkPtr launch(Launch launch);
  WorkPtr queue(Launch launch);
  c10::intrusive_ptr<c10d::Backend> gloo_of(Queue& queue);

  MakeGloo make_;
  std::unordered_map<Queue*, c10::intrusive_ptr<c10d::Backend>> gloos_;
  std::unordered_map<int, Queue*> own_;  // by device
  std::optional<Launch> coalesced_;
  uint64_t launched_ = 0;
};

}  // namespace async_cpu
