// What a server writes of a checkpoint that its job's chief saves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/shard_writer.h"
#include "server/protocol/protocol.h"
#include "server/shard/image.h"
#include "server/shard/ordered_rows.h"
#include "server/shard/shard.h"

namespace muster::server {

/// Whose part of a draft with that id it is: "server-1-71".
std::string writer_of_server(uint32_t server, uint64_t id);
/// What the part calls a parameter's part, "master/NAME", and what it has of a table: "rows/NAME", int64 [n], ascending
/// over all servers, "row_values/NAME", fp32 [n, dim], and "row_states/0/NAME" and so on, the optimizer's by kind.
std::string name_in_part(const ParameterSpec& parameter, Part part);
std::string name_of_rows(const TableSpec& table);
std::string name_of_row_values(const TableSpec& table);
std::string name_of_row_states(const TableSpec& table, size_t kind);

/// A server's part. Pieces of parameters are those of its chunks. Rows of a table ascend over the whole: where there
/// are several servers each writes its own into a file of the draft, and then, from the files of all, a part of all.
/// Owned by one thread.
class ShardPart {
 public:
  /// `images`: of Shard::members(), by HeldSums::begin_cut. Throws InvalidArgument for a request that names parameters
  /// that there are not.
  ShardPart(std::shared_ptr<const Shard> shard, uint32_t server, WritePart request,
            std::vector<std::unique_ptr<Image>> images);
  ~ShardPart();

  const std::filesystem::path& draft() const noexcept { return draft_; }
  std::string writer() const { return writer_of(server_); }
  uint64_t id() const noexcept { return request_.id; }
  const WritesPart& answer() const noexcept { return answer_; }

  /// Blocks until the part is on the disk. `is_to_go_on` is called often, and ends it by what it throws. Throws
  /// CheckpointError where the system refuses, the chief does not wait any more, or another server could not write.
  void write(const std::function<void()>& is_to_go_on);

 private:
  std::string writer_of(uint32_t server) const { return writer_of_server(server, request_.id); }
  bool is_left(uint32_t parameter) const;
  bool has_state(const PartOfParameter& part) const;
  void describe_chunk(const Chunk& chunk, const checkpoint::NamedTensors& tensors);
  void describe_tables();
  std::vector<checkpoint::Run> runs_of_chunk(size_t chunk);
  std::vector<checkpoint::Run> runs_of_block(uint32_t table, const OrderedRows& rows, uint64_t first,
                                             const RowBlock& block) const;
  std::unique_ptr<OrderedRows> own_rows(uint32_t table) const;
  std::filesystem::path file_of(uint32_t table, uint32_t server) const;
  void await_file(uint32_t table, uint32_t server, const std::function<void()>& check) const;
  int64_t rows_at_once(uint32_t table) const;

  const std::shared_ptr<const Shard> shard_;
  const uint32_t server_;
  const WritePart request_;
  const std::filesystem::path draft_;
  std::vector<std::unique_ptr<Image>> images_;  // of stripes
  const uint64_t file_bytes_;
  std::vector<Chunk> chunks_;                        // of this server
  std::vector<checkpoint::NamedTensors> of_chunks_;  // by chunk
  std::vector<std::vector<uint64_t>> rows_of_;       // by table and stripe
  WritesPart answer_;
};

}  // namespace muster::server
