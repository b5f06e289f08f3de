#include "server/worker/client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "muster/error.h"

namespace muster::server {

namespace {

constexpr uint64_t kSpareBytes = uint64_t{64} << 20;

// Address space for the log, and for whatever is read. How much a step has of tables nobody knows before.
uint64_t shared_bytes(const std::vector<Chunk>& chunks, bool has_tables, uint64_t log_bytes) {
  constexpr uint64_t kCopies = 4;
  constexpr uint64_t kTableBytes = uint64_t{16} << 30;
  uint64_t parameters = 0;
  for (const auto& chunk : chunks) parameters += static_cast<uint64_t>(chunk.gradient_bytes());
  return PushLog::memory_needed(chunks, log_bytes) + kCopies * parameters + kSpareBytes +
         (has_tables ? kTableBytes : 0);
}

// Throws InvalidArgument for what no plan can have.
ClientConfig checked(ClientConfig config) {
  config.plan.validate();
  if (config.servers.size() != config.plan.servers || config.lanes == 0) {
    throw InvalidArgument("a worker needs as many addresses as there are servers, and a lane");
  }
  return config;
}

std::shared_ptr<net::Arena> arena_of(const ClientConfig& config, const std::vector<Chunk>& chunks) {
  if (!config.shares_memory) return nullptr;
  const uint64_t bytes = shared_bytes(chunks, !config.plan.tables.empty(), config.log_bytes);
  return std::make_shared<net::Arena>(bytes / net::Arena::kPage * net::Arena::kPage);
}

}  // namespace

ServerClient::ServerClient(ClientConfig config)
    : config_(checked(std::move(config))),
      chunks_(cut_chunks(config_.plan)),
      memory_(arena_of(config_, chunks_)),
      replay_(config_, chunks_, memory_.arena()),
      requests_(config_, replay_, memory_.arena()),
      rows_(config_, memory_, replay_, requests_) {}

ServerClient::~ServerClient() = default;

void ServerClient::write(uint32_t chunk, Part part, Bytes values) {
  const auto server = static_cast<size_t>(chunks_.at(chunk).server);
  requests_.retried(server, [&] {
    requests_.link(server).send(Write{chunk, part}, {&values, 1});
    return requests_.link(server).receive<Done>(requests_.between());
  });
}

// Nobody comes in before all servers have the values in snapshots. Where the start ends before, the job that begins
// next writes them again.
void ServerClient::start(const std::function<void()>& write, const std::vector<PassProgress>& passes) {
  requests_.begin(
      [&] {
        write();
        requests_.tell_all(Start{passes});
      },
      /*gives_values=*/true);
}

uint64_t ServerClient::join() {
  if (config_.rank == kChief && !config_.joins) requests_.resume();
  const auto joined = requests_.call<Joined>(0, Join{});
  requests_.note_join_step(joined.step);
  passes_at_join_ = joined.passes;
  for (size_t s = 1; s < requests_.num_servers(); ++s) requests_.call<Joined>(s, Join{joined.step});
  requests_.note_joined();
  return joined.step;
}

void ServerClient::push(uint64_t step, uint32_t chunk, std::span<const Bytes> pieces,
                        std::shared_ptr<const void> owner) {
  auto& entry = requests_.entry_of(step);
  if (memory_.is_shared() || !owner) {
    replay_.log().write(entry, chunk, pieces);
  } else {
    replay_.log().lend(entry, chunk, pieces, std::move(owner));
  }
  const Bytes logged = replay_.log().of_chunk(entry, chunk);
  try {
    // What travels does so from where it was just read: the copy is in no cache.
    auto& link = link_of(chunk);
    if (link.is_broken()) return;
    Replay::send_push(link, step, chunk, memory_.is_shared() ? std::span(&logged, 1) : pieces, requests_.between());
  } catch (const LinkBroken&) {
    return;
  }
}

void ServerClient::flush() {
  for (size_t s = 0; s < requests_.num_servers(); ++s) {
    requests_.retried(s, [&] {
      if (requests_.link(s).is_broken()) throw LinkBroken("the connection is broken");
      requests_.link(s).drain(requests_.between());
      return true;
    });
  }
}

Decision ServerClient::commit(uint64_t step, std::vector<double> numbers, std::string record) {
  Commit commit{step, std::move(numbers), std::move(record)};
  commit.cut = requests_.durable().newest;
  commit.log_is_full = replay_.log().is_full();
  auto decision = requests_.call<Decision>(0, commit, [&] { replay_.log().take_lent(); });
  requests_.note_decision(decision);
  return decision;
}

std::vector<PassProgress> ServerClient::passes() { return requests_.call<Passes>(0, AskPasses{}).passes; }

Dealt ServerClient::deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  return ask_dealer({++deals_, loader, epoch, batches, false, std::move(finished)});
}

void ServerClient::end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  ask_dealer({++deals_, loader, epoch, batches, true, std::move(finished)});
}

Dealt ServerClient::ask_dealer(const Deal& deal) {
  auto& book = requests_.batches();
  for (const uint64_t batch : deal.finished) book.note_finished({{deal.loader, deal.epoch, batch}}, next_step_);
  const auto dealt = requests_.call<Dealt>(0, deal);
  if (dealt.state == Dealt::State::dealt) book.note_dealt({deal.loader, deal.epoch, dealt.batch});
  if (deal.ends) book.note_end(deal.loader, deal.epoch);
  return dealt;
}

kernels::NormSum ServerClient::sum(uint64_t step, const std::vector<uint32_t>& members) {
  if (const auto* const entry = replay_.log().find(step)) replay_.check_tables(*entry);
  kernels::NormSum sum;
  for (const auto& of_server : requests_.call_all<Partials>(Sum{step, members})) {
    kernels::join_norm_sums(sum, of_server.sum, config_.plan.norm_type);
  }
  return sum;
}

// Server 0, started again, is told of batches that it may not have heard of from this request.
void ServerClient::note_command(Apply& command) {
  command.cut = requests_.cut_of(command.step);
  replay_.note_command(command);
  requests_.batches().note_finished(command.batches, command.step);
  next_step_ = command.step + 1;
}

void ServerClient::apply(Apply command) {
  note_command(command);
  // And will not be durable at once: servers take snapshots.
  const bool is_kept = requests_.durable().all + 1 < command.step;
  requests_.note_applied(requests_.call_all<Applied>(command, [&] {
    if (!config_.plan.is_synchronous()) help_apply(command);
    if (is_kept) replay_.log().take_lent();
  }));
  replay_.log().take_lent();
}

// No other worker makes this one's step: its own lanes divide the chunks and stripes.
void ServerClient::help_apply(const Apply& command) {
  constexpr size_t kRowsWorthALane = size_t{256} << 10;  // bytes: the stripes of fewer are stepped sooner than divided
  std::vector<size_t> counts(requests_.num_servers());
  for (const auto& rows : replay_.log().find(command.step)->rows) counts[rows.server] += rows.payload.size();
  for (auto& count : counts) count /= kRowsWorthALane;
  for (const auto& chunk : chunks_) ++counts[static_cast<size_t>(chunk.server)];
  for (auto& count : counts) count = std::clamp<size_t>(count, 1, config_.lanes) - 1;  // lane 0 is at it
  const std::string message = encode(command);
  requests_.ask_all(counts, [&](size_t s, size_t lane) {
    requests_.link(s).send_chunk(
        static_cast<uint32_t>(lane), Apply::kType, message, {}, {},
        [](const net::Frame& answer) { Link::expect<Applied>(answer); }, requests_.between());
  });
}

void ServerClient::apply_and_read(Apply command, const std::vector<std::byte*>& to) {
  note_command(command);
  requests_.note_applied(requests_.call_all<Applied>(command, [&] { read(Part::parameter, command.step, to); }));
}

uint64_t ServerClient::part_bytes(uint32_t chunk, Part part) const {
  const auto& own = chunks_.at(chunk);
  if (part == Part::steps) return own.pieces.size() * sizeof(float);
  return static_cast<uint64_t>(part == Part::parameter ? own.parameter_bytes() : own.gradient_bytes());
}

std::vector<bool> ServerClient::read(Part part, uint64_t at_least, const std::vector<std::byte*>& to) {
  std::vector<bool> exists(chunks_.size());
  const auto ask = [&](uint32_t c) {
    const std::span<std::byte> place(to[c], part_bytes(c, part));
    Read request{c, part, at_least, false, 0};
    if (const auto shared = memory_.place_of(place)) {
      request.shares = true;
      request.place = *shared;
    }
    link_of(c).send_chunk(
        c, Read::kType, encode(request), {}, place,
        [&exists, c, place](const net::Frame& answer) {
          Link::expect<Values>(answer);
          exists[c] = !answer.payload.empty();
          if (answer.payload.empty() || answer.payload.data() == place.data()) return;
          if (answer.payload.size() != place.size()) throw CommError("a server sent values of another size");
          std::memcpy(place.data(), answer.payload.data(), place.size());
        },
        requests_.between());
  };
  std::vector<std::vector<uint32_t>> wanted(requests_.num_servers());
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (to[c] != nullptr) wanted[static_cast<size_t>(chunks_[c].server)].push_back(c);
  }
  std::vector<size_t> counts;
  for (const auto& chunks : wanted) counts.push_back(chunks.size());
  requests_.ask_all(counts, [&](size_t s, size_t i) { ask(wanted[s][i]); });
  return exists;
}

void ServerClient::leave() { requests_.leave(); }

}  // namespace muster::server
