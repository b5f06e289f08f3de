#include "server/worker/replay.h"

#include <algorithm>
#include <optional>

#include "muster/error.h"
#include "server/protocol/address.h"

namespace muster::server {

void lose(const ClientConfig& config, size_t server, const std::string& why) {
  throw PeerLost(-1, name_of_server(server, config.servers[server]) + " is gone: " + why +
                         ". Look at its log; if it keeps snapshots, start it again with them to go on");
}

void Replay::note_command(const Apply& command) {
  auto* const entry = log_.find(command.step);
  if (entry == nullptr) throw InvalidArgument("a step is applied that was not pushed");
  check_tables(*entry);
  entry->command = command;
}

void Replay::check_tables(const PushLog::Entry& entry) const {
  for (uint32_t t = 0; t < config_.plan.tables.size(); ++t) {
    const auto is_own = [&](const PushLog::Rows& rows) { return rows.table == t; };
    if (std::any_of(entry.rows.begin(), entry.rows.end(), is_own)) continue;
    throw InvalidArgument("table '" + config_.plan.tables[t].name + "' was not pushed in step " +
                          std::to_string(entry.step) + "; push every table, without rows where nobody used any");
  }
}

void Replay::send_push(Link& link, uint64_t step, uint32_t chunk, std::span<const Bytes> values,
                       const Between& between) {
  link.send_chunk(
      chunk, Push::kType, encode(Push{step, chunk}), values, {},
      [](const net::Frame& answer) { Link::expect<Pushed>(answer); }, between);
}

void Replay::send_rows(Link& link, uint64_t step, const PushLog::Rows& rows, const Between& between) {
  const Bytes payload(rows.payload);
  link.send_chunk(
      rows.table, PushRows::kType, encode(PushRows{step, rows.table, rows.part, rows.parts}), {&payload, 1}, {},
      [](const net::Frame& answer) { Link::expect<Pushed>(answer); }, between);
}

void Replay::resend(size_t server, Link& link, uint64_t joined_at, const std::function<Between()>& between) {
  link.send(Recall{});
  const auto recalled = link.receive<Recalled>(between());
  std::vector<uint32_t> own;
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c].server == static_cast<int>(server)) own.push_back(c);
  }
  if (recalled.steps.size() != own.size() + config_.plan.tables.size()) {
    lose(config_, server, "it holds another number of chunks");
  }
  if (!config_.plan.is_synchronous() && !recalled.steps.empty()) {
    const uint64_t least = *std::min_element(recalled.steps.begin(), recalled.steps.end());
    const uint64_t first = log_.first_step();
    if (std::max(least, joined_at) + 1 < first) {
      throw CheckpointError(name_of_server(server, config_.servers[server]) + " goes on after this worker's step " +
                            std::to_string(least) + ", and nobody has what it pushed up to step " +
                            std::to_string(first - 1) +
                            " any more: the newest snapshot is damaged, or was taken away. Start all workers again to "
                            "go on without these steps");
    }
  }
  log_.take_lent();
  for (const auto& entry : log_.entries()) {
    bool lacks = false;
    for (size_t i = 0; i < own.size(); ++i) {
      if (recalled.steps[i] >= entry.step || !entry.pushed[own[i]]) continue;
      const Bytes values = log_.of_chunk(entry, own[i]);
      send_push(link, entry.step, own[i], {&values, 1}, between());
      lacks = true;
    }
    for (const auto& rows : entry.rows) {
      if (rows.server != server || recalled.steps[own.size() + rows.table] >= entry.step) continue;
      send_rows(link, entry.step, rows, between());
      lacks = true;
    }
    link.drain(between());
    if (!lacks) continue;
    if (const std::optional<Apply> command = entry.command) {
      link.send(*command);
      link.note_durable(link.receive<Applied>(between()).durable);
    }
  }
}

}  // namespace muster::server
