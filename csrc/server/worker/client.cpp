#include <algorithm>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "core/wait_hook.h"
#include "server/protocol/address.h"
#include "server/worker/client_calls.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;

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

}  // namespace

ServerClient::ServerClient(ClientConfig config)
    : config_(std::move(config)), chunks_((config_.plan.validate(), cut_chunks(config_.plan))) {
  if (config_.servers.size() != config_.plan.servers || config_.lanes == 0) {
    throw InvalidArgument("a worker needs as many addresses as there are servers, and a lane");
  }
  if (config_.shares_memory) {
    const uint64_t bytes = shared_bytes(chunks_, !config_.plan.tables.empty(), config_.log_bytes);
    memory_ = std::make_shared<net::Arena>(bytes / net::Arena::kPage * net::Arena::kPage);
  }
  for (const auto& table : config_.plan.tables) {
    state_widths_.push_back(empty_table(table, config_.plan.groups).state_width());
  }
  log_ = std::make_unique<PushLog>(chunks_, memory_, config_.log_bytes);
  healing_.resize(config_.servers.size());
  for (const auto& name : config_.servers) {
    links_.push_back(std::make_unique<Link>(
        Link::Config{name, config_.rank, config_.lanes, milliseconds(config_.plan.heartbeat_ms)}));
  }
  is_started_ = true;
  for (size_t s = 0; s < links_.size(); ++s) {
    connect(s, /*is_first=*/true);
    links_[s]->keep_alive();
  }
}

ServerClient::~ServerClient() = default;

void ServerClient::lose(size_t server, const std::string& why) const {
  throw PeerLost(-1, "parameter server " + std::to_string(server) + " (" + address_of(config_.servers[server]) +
                         ") is gone: " + why +
                         ". Look at its log; if it keeps snapshots, start it again with them to go on");
}

ServerClient::Clock::time_point ServerClient::limit() const {
  return Clock::now() + milliseconds(config_.plan.timeout_ms) * 3 / 2;
}

void ServerClient::wait_a_slice(Clock::time_point deadline) {
  if (Clock::now() > deadline) {
    throw Timeout("the parameter servers did not answer within the timeout; look at their logs and the other workers'");
  }
  WaitHook::call();
  heal();
}

std::function<void()> ServerClient::between() {
  return [this, deadline = limit()] { wait_a_slice(deadline); };
}

// Another server may wait for what this worker has to push again.
void ServerClient::heal() {
  if (!has_joined_) return;
  for (size_t s = 0; s < links_.size(); ++s) {
    if (!healing_[s] && links_[s]->has_ended()) recover(s);
  }
}

void ServerClient::connect(size_t server, bool is_first) {
  auto& link = *links_[server];
  const auto deadline = Clock::now() + config_.patience;
  const uint64_t life = link.life();
  std::string why = "nobody listens there";
  for (;;) {
    try {
      incarnation_ = link.connect(incarnation_, memory_);
      link.send(Configure{static_cast<uint32_t>(server), config_.plan, config_.job, config_.facts});
      const bool is_started = link.receive<Configured>(between()).started;
      if (is_first) {
        is_started_ = is_started_ && is_started;
      } else if (!is_started && (is_started_ || link.life() != life)) {
        lose(server, "it started again without what it was given");
      }
      return;
    } catch (const LinkBroken& error) {
      why = error.what();
    }
    if (Clock::now() > deadline) lose(server, why);
    std::this_thread::sleep_for(kBetweenTries);
    WaitHook::call();
  }
}

void ServerClient::recover(size_t server) {
  healing_[server] = true;
  const auto done = std::shared_ptr<void>(nullptr, [&](void*) { healing_[server] = false; });
  const auto deadline = limit();
  for (;;) {
    try {
      connect(server, /*is_first=*/false);
      if (has_joined_) {
        auto& link = *links_[server];
        if (server == 0 && last_decision_) {
          link.send(*last_decision_);
          link.receive<Done>(between());
        }
        link.send(Join{joined_at_, /*returns=*/true});
        link.receive<Joined>(between());
        replay(server);
      }
      return;
    } catch (const LinkBroken& error) {
      if (Clock::now() > deadline) lose(server, error.what());
    }
  }
}

// Pushes and steps, in order, that the server lacks.
void ServerClient::replay(size_t server) {
  auto& link = *links_[server];
  link.send(Recall{});
  const auto recalled = link.receive<Recalled>(between());
  std::vector<uint32_t> own;
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (chunks_[c].server == static_cast<int>(server)) own.push_back(c);
  }
  if (recalled.steps.size() != own.size() + config_.plan.tables.size()) {
    lose(server, "it holds another number of chunks");
  }
  log_->take_lent();
  for (const auto& entry : log_->entries()) {
    bool lacks = false;
    for (size_t i = 0; i < own.size(); ++i) {
      if (recalled.steps[i] >= entry.step || !entry.pushed[own[i]]) continue;
      const Bytes values = log_->of_chunk(entry, own[i]);
      send_push(entry.step, own[i], {&values, 1});
      lacks = true;
    }
    for (const auto& rows : entry.rows) {
      if (rows.server != server || recalled.steps[own.size() + rows.table] >= entry.step) continue;
      send_rows(entry.step, rows);
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

void ServerClient::ask_all(const std::vector<size_t>& counts, const std::function<void(size_t, size_t)>& ask) {
  whole([&] {
    std::vector<uint64_t> asked(links_.size());  // over which connection; 0: none
    for (size_t s = 0; s < links_.size(); ++s) asked[s] = links_[s]->is_broken() ? 0 : links_[s]->connects();
    const size_t most = *std::max_element(counts.begin(), counts.end());
    for (size_t i = 0; i < most; ++i) {
      for (size_t s = 0; s < links_.size(); ++s) {
        if (i >= counts[s] || asked[s] != links_[s]->connects()) continue;
        try {
          ask(s, i);
        } catch (const LinkBroken&) {
          asked[s] = 0;  // all again, below
        }
      }
    }
    for (size_t s = 0; s < links_.size(); ++s) {
      if (counts[s] == 0) continue;
      retried(s, [&] {
        if (asked[s] != links_[s]->connects()) {
          asked[s] = links_[s]->connects();
          for (size_t i = 0; i < counts[s]; ++i) ask(s, i);
        }
        links_[s]->drain(between());
        return true;
      });
    }
    return true;
  });
}

void ServerClient::write(uint32_t chunk, Part part, Bytes values) {
  const auto server = static_cast<size_t>(chunks_.at(chunk).server);
  retried(server, [&] {
    links_[server]->send(Write{chunk, part}, {&values, 1});
    return links_[server]->receive<Done>(between());
  });
}

void ServerClient::start() {
  call_all<Done>(Start{});
  is_started_ = true;
}

uint64_t ServerClient::join() {
  uint64_t made = 0;  // what a job before may have left unequal
  if (config_.plan.is_synchronous()) {
    for (const auto& recalled : call_all<Recalled>(Recall{})) {
      for (const uint64_t step : recalled.steps) made = std::max(made, step);
    }
  }
  const auto joined = call<Joined>(0, Join{made});
  joined_at_ = joined.step;
  passes_at_join_ = joined.passes;
  for (size_t s = 1; s < links_.size(); ++s) call<Joined>(s, Join{joined_at_});
  is_started_ = has_joined_ = true;
  return joined_at_;
}

std::byte* ServerClient::allocate(uint64_t bytes) {
  if (memory_) return memory_->allocate(bytes);
  heap_.emplace_back(new std::byte[bytes + kPayloadAlignment]);
  const auto address = reinterpret_cast<uintptr_t>(heap_.back().get());
  return heap_.back().get() + (kPayloadAlignment - address % kPayloadAlignment) % kPayloadAlignment;
}

std::optional<uint64_t> ServerClient::shared_place(std::span<const std::byte> memory) const noexcept {
  const auto base = reinterpret_cast<uintptr_t>(memory_ ? memory_->data() : nullptr);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  if (!memory_ || at < base || at - base > memory_->capacity() - memory.size()) return std::nullopt;
  return at - base;
}

uint64_t ServerClient::durable() const noexcept {
  uint64_t durable = links_.front()->durable();
  for (const auto& link : links_) durable = std::min(durable, link->durable());
  return durable;
}

PushLog::Entry& ServerClient::entry_of(uint64_t step) {
  log_->release(durable());
  if (auto* known = log_->find(step)) return *known;
  return *wait_for_log([&] { return log_->open(step); });
}

void ServerClient::send_push(uint64_t step, uint32_t chunk, std::span<const Bytes> values) {
  link_of(chunk).send_chunk(
      chunk, Push::kType, encode(Push{step, chunk}), values, {},
      [](const net::Frame& answer) { Link::expect<Pushed>(answer); }, between());
}

void ServerClient::push(uint64_t step, uint32_t chunk, std::span<const Bytes> pieces,
                        std::shared_ptr<const void> owner) {
  auto& entry = entry_of(step);
  if (memory_ || !owner) {
    log_->write(entry, chunk, pieces);
  } else {
    log_->lend(entry, chunk, pieces, std::move(owner));
  }
  const Bytes logged = log_->of_chunk(entry, chunk);
  try {
    // What travels does so from where it was just read: the copy is in no cache.
    if (!link_of(chunk).is_broken()) send_push(step, chunk, memory_ ? std::span(&logged, 1) : pieces);
  } catch (const LinkBroken&) {
    return;
  }
}

void ServerClient::flush() {
  for (size_t s = 0; s < links_.size(); ++s) {
    retried(s, [&] {
      if (links_[s]->is_broken()) throw LinkBroken("the connection is broken");
      links_[s]->drain(between());
      return true;
    });
  }
}

Decision ServerClient::commit(uint64_t step, std::vector<double> numbers, std::string record) {
  auto decision = call<Decision>(0, Commit{step, std::move(numbers), std::move(record)}, [&] { log_->take_lent(); });
  last_decision_ = decision;
  return decision;
}

Dealt ServerClient::deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  return call<Dealt>(0, Deal{++deals_, loader, epoch, batches, false, std::move(finished)});
}

void ServerClient::end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  call<Dealt>(0, Deal{++deals_, loader, epoch, batches, true, std::move(finished)});
}

void ServerClient::note_command(const Apply& command) {
  auto* const entry = log_->find(command.step);
  if (entry == nullptr) throw InvalidArgument("a step is applied that was not pushed");
  check_tables(*entry);
  entry->command = command;
}

void ServerClient::note_applied(const std::vector<Applied>& answers) {
  for (size_t s = 0; s < links_.size(); ++s) links_[s]->note_durable(answers[s].durable);
  log_->release(durable());
}

void ServerClient::apply(const Apply& command) {
  note_command(command);
  const bool is_kept = durable() + 1 < command.step;  // and will not be durable at once: servers take snapshots
  note_applied(call_all<Applied>(command, [&] {
    if (!config_.plan.is_synchronous()) help_apply(command);
    if (is_kept) log_->take_lent();
  }));
  log_->take_lent();
}

// No other worker makes this one's step: its own lanes divide the chunks.
void ServerClient::help_apply(const Apply& command) {
  std::vector<size_t> counts(links_.size());
  for (const auto& chunk : chunks_) ++counts[static_cast<size_t>(chunk.server)];
  for (auto& count : counts) count = std::clamp<size_t>(count, 1, config_.lanes) - 1;  // lane 0 is at it
  const std::string message = encode(command);
  ask_all(counts, [&](size_t s, size_t lane) {
    links_[s]->send_chunk(
        static_cast<uint32_t>(lane), Apply::kType, message, {}, {},
        [](const net::Frame& answer) { Link::expect<Applied>(answer); }, between());
  });
}

void ServerClient::apply_and_read(const Apply& command, const std::vector<std::byte*>& to) {
  note_command(command);
  note_applied(call_all<Applied>(command, [&] { read(Part::parameter, command.step, to); }));
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
    if (const auto shared = shared_place(place)) {
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
        between());
  };
  std::vector<std::vector<uint32_t>> wanted(links_.size());
  for (uint32_t c = 0; c < chunks_.size(); ++c) {
    if (to[c] != nullptr) wanted[static_cast<size_t>(chunks_[c].server)].push_back(c);
  }
  std::vector<size_t> counts;
  for (const auto& chunks : wanted) counts.push_back(chunks.size());
  ask_all(counts, [&](size_t s, size_t i) { ask(wanted[s][i]); });
  return exists;
}

void ServerClient::leave() {
  for (const auto& link : links_) {
    try {
      if (link->is_broken()) continue;
      link->send(Leave{});
      link->receive<Done>([] { WaitHook::call(); });
    } catch (const LinkBroken&) {
      continue;  // it knows by the silence
    }
  }
}

}  // namespace muster::server
