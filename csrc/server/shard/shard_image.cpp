#include "server/shard/shard_image.h"

#include <algorithm>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::server {

uint64_t file_bytes_of(const std::vector<std::unique_ptr<Image>>& images) {
  constexpr uint64_t kMost = uint64_t{256} << 20, kLeast = uint64_t{16} << 20, kFiles = 64;
  uint64_t bytes = 0;
  for (const auto& image : images) bytes += image->row_bytes();
  return std::clamp(bytes / kFiles, kLeast, kMost);
}

ShardImage::ShardImage(std::shared_ptr<const Shard> shard, std::vector<std::unique_ptr<Image>> images)
    : shard_(std::move(shard)), images_(std::move(images)) {}

ShardImage::~ShardImage() { images_.clear(); }

std::vector<Image::Facts> ShardImage::facts() const {
  std::vector<Image::Facts> facts;
  for (const auto& image : images_) facts.push_back(image->facts);
  return facts;
}

checkpoint::NamedTensors ShardImage::next() {
  for (; next_ < images_.size(); ++next_) {
    auto tensors = images_[next_]->next();
    if (!tensors.empty()) return tensors;
    images_[next_].reset();
  }
  return {};
}

ShardRestorer::ShardRestorer(Shard& shard, std::vector<Image::Facts> facts) : shard_(shard), facts_(std::move(facts)) {
  if (facts_.size() == shard_.members().size()) return;
  throw CheckpointError("a snapshot has " + std::to_string(facts_.size()) + " chunks and stripes of tables, not " +
                        std::to_string(shard_.members().size()) + "; use an older snapshot");
}

void ShardRestorer::take(const checkpoint::NamedTensors& tensors) {
  const auto& members = shard_.members();
  while (next_ < members.size() && members[next_]->restore(facts_[next_], tensors)) ++next_;
}

void ShardRestorer::finish() const {
  if (next_ == facts_.size()) return;
  const bool is_chunk = next_ < shard_.chunks().size();
  throw CheckpointError("a snapshot lacks tensors of " +
                        (is_chunk ? "chunk " + std::to_string(shard_.chunks()[next_])
                                  : "table '" + shard_.tables().spec_of(next_ - shard_.chunks().size()).name + "'") +
                        "; use an older snapshot");
}

}  // namespace muster::server
