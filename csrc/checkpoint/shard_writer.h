// The files of a snapshot, filled one after the other with tensors and runs of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/snapshot.h"

namespace muster::checkpoint {

/// A value: elements of a tensor, one behind the other in row-major order.
struct Run {
  std::string name;            ///< of the whole tensor
  std::vector<int64_t> shape;  ///< of the whole tensor
  int64_t begin = 0;           ///< the first element's place in it
  at::Tensor elements;         ///< of any shape

  /// All of a tensor.
  static Run whole(const std::string& name, const at::Tensor& tensor) {
    return {name, tensor.sizes().vec(), 0, tensor};
  }
  bool is_whole() const { return begin == 0 && elements.numel() == c10::multiply_integers(shape); }
};

/// Runs that wait for their file. Owned by one thread.
class ShardWriter {
 public:
  /// Writes into `folder`, files named "<prefix>00000.safetensors" and so on. `options` outlives this.
  ShardWriter(std::filesystem::path folder, std::string prefix, const SnapshotOptions& options);

  /// What is given at once lies in one file, which up to options.shard_bytes are gathered for. Empty runs of tensors
  /// that have elements are left out. Throws InvalidArgument for what cannot be stored, and elements that come twice;
  /// CheckpointError where the system refuses.
  void add(std::vector<Run> runs);

  /// The files, and what is in them, once all are on the disk. Pieces of a tensor are in the order of their elements;
  /// they need not be all of it.
  Manifest finish();

 private:
  void flush();

  const std::filesystem::path folder_;
  const std::string prefix_;
  const SnapshotOptions& options_;
  std::map<std::string, Run> runs_;  // that wait, by their names in the file
  uint64_t bytes_ = 0;               // of runs_
  std::vector<Shard> shards_;
  std::map<std::string, TensorEntry> tensors_;
};

/// Writes a manifest's text into a file that did not exist, and flushes it and its folder. `pieces`: as manifest_of.
void write_manifest(const std::filesystem::path& path, const Manifest& manifest, const SnapshotOptions& options,
                    Pieces pieces = Pieces::all);

}  // namespace muster::checkpoint
