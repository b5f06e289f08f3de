#include "window/server_push.h"

#include <memory>

namespace muster {

// What becomes of a bucket once its sums are there.
class ServerPush::Delivery final : public comm::Work::Impl {
 public:
  Delivery(const ServerPush& push, size_t bucket, comm::Work sums)
      : push_(push), bucket_(bucket), sums_(std::move(sums)) {}

  bool advance() override {
    if (!is_done_ && sums_.done()) deliver();
    return is_done_;
  }
  void wait(comm::Milliseconds timeout) override {
    if (is_done_) return;
    sums_.wait(timeout);
    deliver();
  }

 private:
  void deliver() {
    is_done_ = true;  // also where servers are gone: nothing is pushed twice
    for (const int index : push_.buckets_[bucket_].parameters) {
      const auto p = static_cast<size_t>(index);
      push_.take_(p, push_.buckets_.view(p));
    }
  }

  const ServerPush& push_;
  const size_t bucket_;
  comm::Work sums_;
  bool is_done_ = false;
};

comm::Work ServerPush::reduce(size_t b) {
  const bool is_first = replicas_.rank() == 0;
  auto sums = replicas_.all_reduce(buckets_[b].sums, ReduceOp::sum, buckets_.layout().digest() + b, {is_first});
  if (!is_first) return sums;
  auto delivery = std::make_shared<Delivery>(*this, b, std::move(sums));
  delivery->advance();
  return comm::Work(std::move(delivery));
}

}  // namespace muster
