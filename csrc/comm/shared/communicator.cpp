// The Communicator of ranks that share memory.
#include "comm/shared/group.h"

namespace muster::comm::shared {

namespace {

class SharedCommunicator final : public Communicator, public PeerMemory {
 public:
  explicit SharedCommunicator(std::shared_ptr<Group> group)
      : Communicator({.rank = group->rank(), .size = group->size()}, this), group_(std::move(group)) {}
  ~SharedCommunicator() override { group_->close(); }

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override {
    group_->check();
    return group_->space().allocate(group_->rank(), numel, dtype);
  }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers& receivers) override {
    return issue(all_reduce_request(tensor, op, tag), tensor, receivers.has_this);
  }

  Work broadcast(const at::Tensor& tensor, int source) override {
    return issue(broadcast_request(tensor, source, size()), tensor, true);
  }

  Work all_gather(const at::Tensor& input, GatherSizes /*sizes*/) override {
    const at::Tensor contiguous = input.contiguous();
    return issue(all_gather_request(contiguous), contiguous, true);
  }

  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return issue(reduce_scatter_request(output, input, op, size()), input, true, output);
  }

  Work barrier() override { return issue(Request{}, at::Tensor(), false); }

  Work visit(const at::Tensor& tensor, uint64_t tag, Visit visit) override {
    auto operation = make_operation(visit_request(tensor, tag), tensor, false);
    if (operation->header.placement != Placement::direct) {
      throw InvalidArgument("peers visit memory that allocate() of their group gave; copy the tensor there first");
    }
    operation->visit = std::move(visit);
    return group_->issue(std::move(operation));
  }

  at::Tensor allocate_common(int64_t bytes) override {
    group_->check();
    return group_->space().allocate_common(bytes);
  }

  std::optional<uint64_t> address_of(const void* data, size_t bytes) const noexcept override {
    return group_->space().address_of(rank(), data, bytes);
  }

  void* at(int rank, uint64_t address) const noexcept override { return group_->space().at(rank, address); }

  void begin_stores() override { group_->begin_stores(); }
  void end_stores() noexcept override { group_->end_stores(); }
  void end(const Error& error) noexcept override { group_->end(error); }
  bool has_ended() const noexcept override { return group_->has_ended(); }
  bool may_have_stores() const noexcept override { return group_->may_have_stores(); }

  void begin_scope(uint64_t scope, QueuedOperations* /*queue*/) override { group_->begin_scope(scope); }
  Work end_scope(ScopeEnd end, const std::string& reason) override {
    group_->end_scope(end, reason);
    return Work();
  }
  void abort(const std::string& reason) noexcept override { group_->abort(reason); }

 private:
  Work issue(const Request& request, const at::Tensor& tensor, bool receive, const at::Tensor& output = {}) {
    auto operation = make_operation(request, tensor, receive);
    operation->output = output;
    return group_->issue(std::move(operation));
  }

  std::shared_ptr<Operation> make_operation(const Request& request, const at::Tensor& tensor, bool receive) {
    if (tensor.defined() && !tensor.device().is_cpu()) {
      throw InvalidArgument("this group communicates CPU tensors; got one on " + tensor.device().str() +
                            ", move it first");
    }
    auto operation = std::make_shared<Operation>();
    Header& header = operation->header;
    header.request = request;
    header.request.scope = group_->scope();
    header.receive = receive;
    header.bytes = tensor.defined() ? tensor.nbytes() : 0;
    header.placement = Placement::staged;
    if (request.kind == OpKind::barrier || (request.kind == OpKind::broadcast && request.source != rank())) {
      header.placement = Placement::none;
    } else if (header.bytes <= kInlineBytes && request.kind != OpKind::visit) {
      header.placement = Placement::in_header;
    } else if (const auto address = group_->space().address_of(rank(), tensor.const_data_ptr(), header.bytes)) {
      header.placement = Placement::direct;
      header.address = *address;
    }
    operation->tensor = tensor;
    return operation;
  }

  const std::shared_ptr<Group> group_;
};

}  // namespace

CommunicatorPtr make_shared_communicator(std::shared_ptr<SharedSpace> space, int rank, Milliseconds timeout) {
  return std::make_shared<SharedCommunicator>(std::make_shared<Group>(std::move(space), rank, timeout));
}

}  // namespace muster::comm::shared
