// All that a shard held at one moment, on its way to a snapshot and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "checkpoint/safetensors.h"
#include "server/shard/image.h"
#include "server/shard/shard.h"

namespace muster::server {

/// Bytes that a file of what images hold gathers: some megabytes, but few files of a large server. So much of it is in
/// memory twice.
uint64_t file_bytes_of(const std::vector<std::unique_ptr<Image>>& images);

/// Images of a shard's chunks and tables, one after the other. Owned by one thread.
class ShardImage {
 public:
  /// `images` are by chunk, then by table and stripe, as Shard::begin_images has them.
  ShardImage(std::shared_ptr<const Shard> shard, std::vector<std::unique_ptr<Image>> images);
  ~ShardImage();

  std::vector<Image::Facts> facts() const;

  /// See file_bytes_of.
  uint64_t file_bytes() const { return file_bytes_of(images_); }

  /// The next tensors; none after the last. An image ends once all of it was given.
  checkpoint::NamedTensors next();

 private:
  std::shared_ptr<const Shard> shard_;  // outlives the images
  std::vector<std::unique_ptr<Image>> images_;
  size_t next_ = 0;
};

/// Fills a shard that has held nothing yet. Owned by one thread.
class ShardRestorer {
 public:
  /// `facts`: those of a ShardImage. Throws CheckpointError where they are of another number of chunks and stripes.
  ShardRestorer(Shard& shard, std::vector<Image::Facts> facts);

  /// Takes tensors of ShardImage::next in their order; of several calls of it together, and with others among them.
  /// Throws CheckpointError for another shape or dtype than the plan's.
  void take(const checkpoint::NamedTensors& tensors);
  /// Throws CheckpointError where something is missing.
  void finish() const;

 private:
  Shard& shard_;
  const std::vector<Image::Facts> facts_;
  size_t next_ = 0;
};

}  // namespace muster::server
