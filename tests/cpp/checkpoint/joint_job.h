// What ranks write together in tests, and the ranks of a job in one thread.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/joint_snapshot.h"
#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "support/run_ranks.h"

namespace muster::testing {

using namespace muster::checkpoint;
using std::chrono::milliseconds;
namespace fs = std::filesystem;

// Two tensors that are cut, and others that are not.
inline NamedTensors alike() {
  return {{"a/large", at::arange(300'001, at::kFloat)},
          {"a/scalar", at::full({}, 7.0)},
          {"b/empty", at::empty({0, 3})},
          {"b/gaps", at::arange(600'000, at::kFloat).view({600, 1000}).t()},
          {"c/rows", at::arange(400'000, at::kDouble).view({1000, 400})},
          {"z/empty", at::empty({0})}};
}

inline const at::Tensor& scattered() {
  static const at::Tensor tensor = at::arange(1000, at::kFloat).view({10, 100});
  return tensor;
}

// What rank r of n has: of the divided tensor the part that begins at 1000 r / n, but rank 0 nothing.
inline JointContent content_of(int rank, int ranks) {
  JointContent content{.alike = alike()};
  const int64_t parts = ranks - 1;
  const int64_t begin = rank == 0 ? 0 : 1000 * (rank - 1) / parts;
  const int64_t end = rank == 0 ? 0 : 1000 * rank / parts;
  content.divided.push_back({"divided", {10, 100}, begin, scattered().flatten().slice(0, begin, end)});
  if (rank == 0) content.chiefs = {{"own", at::ones({5})}};
  return content;
}

inline Snapshot whole() {
  auto tensors = alike();
  tensors["divided"] = scattered();
  tensors["own"] = at::ones({5});
  return {std::move(tensors), {{"steps", int64_t{3}}}};
}

inline bool are_equal(const Snapshot& a, const Snapshot& b) {
  return a.metadata == b.metadata && std::ranges::equal(a.tensors, b.tensors, [](const auto& x, const auto& y) {
           return x.first == y.first && x.second.scalar_type() == y.second.scalar_type() &&
                  x.second.sizes() == y.second.sizes() && x.second.equal(y.second);
         });
}

// The ranks of a job in one thread: what they tell each other is handed on.
struct JointJob {
  JointJob(const std::vector<fs::path>& folders, const SnapshotOptions& options = {}, net::StorePtr the_store = {})
      : store(std::move(the_store)) {
    for (const auto& folder : folders) writers.push_back(std::make_unique<SnapshotWriter>(folder, options));
  }

  int size() const { return static_cast<int>(writers.size()); }

  // Whether all copied; `meanwhile` is called once the chief has begun.
  bool copy(const std::vector<JointContent>& contents, const std::function<void()>& meanwhile = {}) {
    joints.clear();
    announced.clear();
    for (int r = 0; r < size(); ++r) {
      joints.push_back(std::make_unique<JointSnapshot>(*writers[static_cast<size_t>(r)], r, store));
    }
    for (const auto& joint : joints) announced.push_back(joint->announce(lineage));
    if (meanwhile) meanwhile();
    std::vector<std::string> looked;
    for (size_t r = 0; r < joints.size(); ++r) looked.push_back(joints[r]->look(announced, contents[r]));
    std::vector<bool> are_joint;
    for (const auto& joint : joints) are_joint.push_back(joint->copy(looked));
    for (const bool is_joint : are_joint) CHECK(is_joint == are_joint.front());
    return are_joint.front();
  }

  bool copy(const std::function<void()>& meanwhile = {}) {
    std::vector<JointContent> contents;
    for (int r = 0; r < size(); ++r) contents.push_back(content_of(r, size()));
    return copy(contents, meanwhile);
  }

  void start(int rank, milliseconds patience = milliseconds(60'000)) {
    joints[static_cast<size_t>(rank)]->start(rank == 0 ? whole().metadata : Metadata(), patience);
  }

  // Of a snapshot that was copied, until all ranks have ended.
  void write_all() {
    for (int rank = size() - 1; rank >= 0; --rank) start(rank);
    for (const auto& writer : writers) writer->wait();
  }

  std::string error_of(int rank) {
    return message_of<CheckpointError>([&] { writers[static_cast<size_t>(rank)]->wait(); });
  }

  // The name of the draft on the chief's host until all have looked.
  std::string draft() const { return announced.front().substr(0, announced.front().find('\n')); }

  // Of a rank's first file.
  fs::path file_of(int rank, const fs::path& folder, const std::string& end_of_draft = "") const {
    const auto end = announced.front().find('\n');
    return folder / (draft() + end_of_draft) /
           ("worker-" + std::to_string(rank) + '-' + announced.front().substr(end + 1, 8) + "-00000.safetensors");
  }

  net::StorePtr store;
  std::string lineage = "1a";
  std::vector<std::unique_ptr<SnapshotWriter>> writers;
  std::vector<std::unique_ptr<JointSnapshot>> joints;
  std::vector<std::string> announced;
};

inline std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

}  // namespace muster::testing
