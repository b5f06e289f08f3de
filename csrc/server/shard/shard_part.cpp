#include "server/shard/shard_part.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "muster/error.h"
#include "server/protocol/chunk_parts.h"
#include "server/shard/held_chunk.h"
#include "server/shard/shard_image.h"

namespace muster::server {

namespace {

namespace fs = std::filesystem;
using checkpoint::Run;

constexpr Part kStates[] = {Part::state0, Part::state1, Part::state2, Part::master};
constexpr std::chrono::milliseconds kLook{5};      // between two looks at what others have written
constexpr int kLooksAnew = 100;                    // after so many a file server is asked anew
constexpr std::chrono::milliseconds kWanted{250};  // between two looks at whether the chief still waits

void check_numbers(const std::vector<uint32_t>& numbers, size_t below) {
  const bool ascend = std::ranges::adjacent_find(numbers, std::greater_equal<>()) == numbers.end();
  if (ascend && (numbers.empty() || numbers.back() < below)) return;
  throw InvalidArgument("parameters or tables of a checkpoint are not ascending numbers of the plan's");
}

std::vector<Chunk> chunks_of(const Shard& shard) {
  const auto all = cut_chunks(shard.plan());
  std::vector<Chunk> own;
  for (const uint32_t index : shard.chunks()) own.push_back(all[index]);
  return own;
}

}  // namespace

std::string writer_of_server(uint32_t server, uint64_t id) {
  return "server-" + std::to_string(server) + "-" + std::to_string(id);
}
std::string name_in_part(const ParameterSpec& parameter, Part part) {
  return std::string(name_of(part)) + "/" + parameter.name;
}
std::string name_of_rows(const TableSpec& table) { return "rows/" + table.name; }
std::string name_of_row_values(const TableSpec& table) { return "row_values/" + table.name; }
std::string name_of_row_states(const TableSpec& table, size_t kind) {
  return "row_states/" + std::to_string(kind) + "/" + table.name;
}

ShardPart::ShardPart(std::shared_ptr<const Shard> shard, uint32_t server, WritePart request,
                     std::vector<std::unique_ptr<Image>> images)
    : shard_(std::move(shard)),
      server_(server),
      request_(std::move(request)),
      draft_(request_.draft),
      file_bytes_(file_bytes_of(images)),
      chunks_(chunks_of(*shard_)) {
  check_numbers(request_.left, shard_->plan().parameters.size());
  check_numbers(request_.begun, shard_->plan().parameters.size());
  check_numbers(request_.tables, shard_->plan().tables.size());
  const auto first_stripe = images.begin() + static_cast<std::ptrdiff_t>(chunks_.size());
  images_.assign(std::make_move_iterator(first_stripe), std::make_move_iterator(images.end()));
  for (size_t c = 0; c < chunks_.size(); ++c) {
    of_chunks_.push_back(images[c]->next());
    describe_chunk(chunks_[c], of_chunks_.back());
  }
  describe_tables();
}

ShardPart::~ShardPart() { images_.clear(); }

bool ShardPart::is_left(uint32_t parameter) const { return std::ranges::binary_search(request_.left, parameter); }

bool ShardPart::has_state(const PartOfParameter& part) const {
  return part.steps > 0 || std::ranges::binary_search(request_.begun, part.parameter);
}

void ShardPart::describe_chunk(const Chunk& chunk, const checkpoint::NamedTensors& tensors) {
  for (const auto& piece : chunk.pieces) {
    const auto find = [&](Part part) { return tensors.find(name_in_image(shard_->plan(), piece, part)); };
    PartOfParameter part{static_cast<uint32_t>(piece.parameter)};
    part.steps = static_cast<double>(find(Part::steps)->second.item<float>());
    for (size_t bit = 0; bit < std::size(kStates); ++bit) {
      if (find(kStates[bit]) != tensors.end()) part.states |= static_cast<uint8_t>(1U << bit);
    }
    if (!has_state(part)) part.states = 0;
    if (answer_.parameters.empty() || answer_.parameters.back() != part) answer_.parameters.push_back(part);
  }
}

void ShardPart::describe_tables() {
  size_t next = 0;
  for (uint32_t t = 0; t < shard_->plan().tables.size(); ++t) {
    PartOfTable part;
    auto& rows_of = rows_of_.emplace_back();
    for (uint32_t s = 0; s < shard_->tables().num_stripes(t); ++s) {
      const auto& facts = images_[next]->facts;
      rows_of.push_back(facts.rows);
      part.rows += facts.rows;
      part.steps = s == 0 ? facts.counted : std::min(part.steps, facts.counted);
      if (!std::ranges::binary_search(request_.tables, t)) images_[next] = nullptr;  // and what it would keep
      ++next;
    }
    answer_.tables.push_back(part);
  }
}

std::vector<Run> ShardPart::runs_of_chunk(size_t c) {
  const auto& plan = shard_->plan();
  std::vector<Run> runs;
  const auto tensors = std::exchange(of_chunks_[c], {});
  for (const auto& piece : chunks_[c].pieces) {
    const auto parameter = static_cast<uint32_t>(piece.parameter);
    if (is_left(parameter)) continue;
    const auto& spec = plan.parameters[parameter];
    const auto add = [&](Part part) {
      const auto found = tensors.find(name_in_image(plan, piece, part));
      if (found == tensors.end()) return;
      runs.push_back({name_in_part(spec, part), spec.sizes, piece.run.begin, found->second});
    };
    add(Part::parameter);
    const auto steps = tensors.at(name_in_image(plan, piece, Part::steps)).item<float>();
    if (has_state({parameter, 0, static_cast<double>(steps)})) std::ranges::for_each(kStates, add);
  }
  return runs;
}

std::vector<Run> ShardPart::runs_of_block(uint32_t table, const OrderedRows& rows, uint64_t first,
                                          const RowBlock& block) const {
  const auto& spec = shard_->plan().tables[table];
  const auto total = static_cast<int64_t>(rows.total());
  const auto begin = static_cast<int64_t>(rows.begin() + first);
  std::vector<Run> runs{{name_of_rows(spec), {total}, begin, block.rows},
                        {name_of_row_values(spec), {total, spec.dim}, begin * spec.dim, block.values}};
  const int64_t width = spec.row_wise_adagrad ? 1 : spec.dim;
  for (int64_t kind = 0; (kind + 1) * width <= block.states.size(1); ++kind) {
    runs.push_back({name_of_row_states(spec, static_cast<size_t>(kind)),
                    {total, width},
                    begin * width,
                    block.states.narrow(1, kind * width, width).contiguous()});
  }
  return runs;
}

std::unique_ptr<OrderedRows> ShardPart::own_rows(uint32_t table) const {
  return rows_of_cut(*shard_, table, rows_of_[table]);
}

fs::path ShardPart::file_of(uint32_t table, uint32_t server) const {
  return draft_ / (writer_of(server) + "-rows-" + std::to_string(table));
}

void ShardPart::await_file(uint32_t table, uint32_t server, const std::function<void()>& check) const {
  const auto file = file_of(table, server);
  const auto writer = writer_of(server);
  for (int look = 0;; ++look) {
    // Ends the wait for one that does not begin, dies, or is stopped: the chief gives the draft up then.
    check();
    const bool is_left = checkpoint::is_unlocked(draft_, writer);
    if (look % kLooksAnew == 0 ? checkpoint::sees(draft_, file) : fs::exists(file)) return;
    checkpoint::has_part(draft_, writer);  // throws what it says
    if (is_left && !checkpoint::sees(draft_, file)) {
      throw CheckpointError(writer + " died before it had written its part");
    }
    std::this_thread::sleep_for(kLook);
  }
}

int64_t ShardPart::rows_at_once(uint32_t table) const {
  constexpr uint64_t kBlocksOfAFile = 4;
  const auto& stripe = shard_->tables().stripe(table, 0);
  const auto row_bytes = static_cast<uint64_t>(stripe.spec.dim + stripe.rows.state_width()) * sizeof(float);
  return static_cast<int64_t>(std::max<uint64_t>(file_bytes_ / kBlocksOfAFile / row_bytes, 1));
}

void ShardPart::write(const std::function<void()>& is_to_go_on) {
  auto looked = std::chrono::steady_clock::time_point::min();
  const auto check = [&] {
    is_to_go_on();
    const auto now = std::chrono::steady_clock::now();
    if (looked + kWanted > now) return;
    looked = now;
    if (!checkpoint::is_locked(draft_, kChiefsPart)) {
      throw CheckpointError("the chief gave the checkpoint up, or ended");
    }
  };
  const auto& plan = shard_->plan();
  const bool is_alone = plan.servers == 1;
  if (!is_alone) {
    for (const uint32_t t : request_.tables) {
      check();
      write_rows(file_of(t, server_), *own_rows(t), rows_at_once(t), check);
    }
    images_.clear();
  }
  size_t next_chunk = 0;
  size_t next_table = 0;
  std::unique_ptr<OrderedRows> rows;
  uint64_t given = 0;  // of them
  const auto open_table = [&](uint32_t table) {
    if (is_alone) return own_rows(table);
    std::vector<fs::path> files;
    for (uint32_t s = 0; s < plan.servers; ++s) {
      await_file(table, s, check);
      files.push_back(file_of(table, s));
    }
    const auto& stripe = shard_->tables().stripe(table, 0);
    return merge_rows(files, server_, stripe.spec.dim, stripe.rows.state_width());
  };
  const checkpoint::NextRuns next = [&]() -> std::vector<Run> {
    check();
    while (next_chunk < chunks_.size()) {
      auto runs = runs_of_chunk(next_chunk++);
      if (!runs.empty()) return runs;
    }
    for (; next_table < request_.tables.size(); ++next_table, rows = nullptr) {
      const uint32_t table = request_.tables[next_table];
      if (!rows) {
        rows = open_table(table);
        given = 0;
        // Somebody says that there are none.
        if (rows->total() == 0 && server_ == 0) {
          auto runs = runs_of_block(table, *rows, 0, rows->next(1));
          ++next_table;
          rows = nullptr;
          return runs;
        }
      }
      if (given == rows->count()) continue;
      const auto block = rows->next(rows_at_once(table));
      auto runs = runs_of_block(table, *rows, given, block);
      given += static_cast<uint64_t>(block.count());
      return runs;
    }
    return {};
  };
  checkpoint::SnapshotOptions options;
  options.shard_bytes = file_bytes_;
  checkpoint::write_part(draft_, writer(), next, options);
}

}  // namespace muster::server
