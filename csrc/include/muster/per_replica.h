// PerReplica: what each of this worker's replicas has of one thing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/error.h"

namespace muster {

namespace detail {
struct LoaderProgress;
}

/// One value per replica of this worker, in replica order. A value; copies of tensors share their memory.
template <class T>
class PerReplica {
  static_assert(!std::is_same_v<T, bool>, "parts are written by several threads at once; use int instead of bool");

 public:
  PerReplica() = default;

  /// Parts whose sizes follow from their type: size(0) of a Tensor or of Example::data, the length of a vector.
  explicit PerReplica(std::vector<T> parts) : parts_(std::move(parts)) {}

  /// Parts that stand for `rows` samples each; 0 marks an empty part. Throws InvalidArgument if their numbers differ.
  /// `loader` and `number`: of those that a prepared loader makes, see loader() and number().
  PerReplica(std::vector<T> parts, std::vector<int64_t> rows, std::shared_ptr<detail::LoaderProgress> loader = nullptr,
             int64_t number = 0)
      : parts_(std::move(parts)), rows_(std::move(rows)), loader_(std::move(loader)), number_(number) {
    if (rows_.size() != parts_.size()) {
      throw InvalidArgument("PerReplica: " + std::to_string(parts_.size()) + " parts with " +
                            std::to_string(rows_.size()) + " row counts; give one count for each part");
    }
  }

  /// Replicas of this worker.
  size_t size() const noexcept { return parts_.size(); }
  /// The part of a replica of this worker. Throws std::out_of_range.
  const T& operator[](size_t local_replica) const { return parts_.at(local_replica); }
  /// Iterates over the parts.
  auto begin() const noexcept { return parts_.begin(); }
  /// The end of the parts.
  auto end() const noexcept { return parts_.end(); }
  /// All parts, in replica order.
  const std::vector<T>& parts() const noexcept { return parts_; }

  /// Samples each part stands for; empty where the parts' types are to tell.
  const std::vector<int64_t>& rows() const noexcept { return rows_; }

  /// The prepared loader that made the parts, if one did.
  const std::shared_ptr<detail::LoaderProgress>& loader() const noexcept { return loader_; }
  /// Which of the loader's batches they are, counted from 1 over all its passes; 0: of no loader.
  int64_t number() const noexcept { return number_; }

 private:
  std::vector<T> parts_;
  std::vector<int64_t> rows_;
  std::shared_ptr<detail::LoaderProgress> loader_;
  int64_t number_ = 0;
};

}  // namespace muster
