// The life of a server: its threads, and its snapshots.
#include "server/shard/server.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "checkpoint/snapshot.h"
#include "core/log.h"
#include "server/shard/session.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatch{20};
constexpr milliseconds kHello{5'000};  // that a connection has to say whose it is
constexpr int kMaxStrangers = 64;      // connections that have not said it yet; further ones wait for their turn
constexpr const char* kMeta = "muster";
constexpr int kKeep = 2;

uint64_t new_life() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

// The last step that all chunks and tables have made, together.
uint64_t all_made(const std::vector<Pushes::Record>& made) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const auto& record : made) least = std::min(least, record.steps);
  return least;
}

// By rank, its incarnation and its last step that all chunks and tables hold.
std::map<uint32_t, std::pair<uint64_t, uint64_t>> all_applied(const std::vector<Pushes::Record>& made) {
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> all;
  for (const auto& record : made) {
    std::map<uint32_t, std::pair<uint64_t, uint64_t>> both;
    for (size_t i = 0; i < record.ranks.size(); ++i) {
      const std::pair mark(record.incarnations[i], record.applied[i]);
      const auto before = all.find(record.ranks[i]);
      if (&record == made.data()) {
        both[record.ranks[i]] = mark;
      } else if (before != all.end()) {
        both[record.ranks[i]] = std::min(mark, before->second);
      }
    }
    all = std::move(both);
  }
  return all;
}

}  // namespace

// What a snapshot says besides tensors.
struct ParameterServer::Saved {
  Configure configured;
  Quorum::Record members;
  std::vector<Shard::Image> images;       // by chunk of the server, without tensors
  std::vector<TableShard::Image> tables;  // likewise
  Dealer::Record batches;

  template <class M, class W>
  static void visit(M& m, W& w) {
    visit_value(m.configured, w);
    Quorum::Record::visit(m.members, w);
    w.list(m.images, kMaxNumbers, [](W& wire, auto& image) { Shard::Image::visit(image, wire); });
    Dealer::Record::visit(m.batches, w);
    w.list(m.tables, kMaxTables, [](W& wire, auto& image) { TableShard::Image::visit(image, wire); });
  }
};

ParameterServer::ParameterServer(ServerConfig config)
    : config_(std::move(config)), life_(new_life()), listener_(net::listen_on_host(config_.name)) {
  if (!config_.snapshots.empty()) restore();
  watch_thread_ = std::thread([this] { watch(); });
  if (!config_.snapshots.empty()) snapshots_.thread = std::thread([this] { keep_snapshots(); });
}

ParameterServer::~ParameterServer() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    for (const auto& session : sessions_) session->channel->close();
    changed_.notify_all();
  }
  if (const auto shard = this->shard()) shard->stop();
  {
    const Lock lock(snapshots_.mutex);
    snapshots_.stops = true;
    snapshots_.changed.notify_all();
  }
  watch_thread_.join();
  if (snapshots_.thread.joinable()) snapshots_.thread.join();
  for (const auto& session : sessions_) session->thread.join();
}

bool ParameterServer::is_deserted() const {
  const Lock lock(mutex_);
  return started_ && had_members_ && quorum_.live().empty();
}

ParameterServer::Stats ParameterServer::stats() const {
  const Lock lock(mutex_);
  Stats stats = stats_;
  stats.connections = sessions_.size();
  if (shard_) stats.held_bytes = shard_->held_bytes();
  return stats;
}

void ParameterServer::watch() noexcept {
  auto last_look = Clock::now();
  bool cannot_accept = false;  // which was logged
  for (;;) {
    try {
      if (accept()) cannot_accept = false;
    } catch (const std::exception& error) {
      if (!std::exchange(cannot_accept, true)) {
        log(LogLevel::error, std::string("a parameter server cannot serve a new connection: ") + error.what());
      }
      std::this_thread::sleep_for(kWatch);
    }
    {
      const Lock lock(mutex_);
      if (stopping_) return;
    }
    const auto now = Clock::now();
    expire(now, now - std::exchange(last_look, now));
    reap();
  }
}

// At most one connection, and none while too many have not said whose they are. Returns whether one came and is served.
bool ParameterServer::accept() {
  {
    Lock lock(mutex_);
    const auto strangers = std::count_if(sessions_.begin(), sessions_.end(),
                                         [](const auto& session) { return !session->is_known && !session->is_over; });
    if (strangers >= kMaxStrangers) {
      changed_.wait_for(lock, kWatch);
      return false;
    }
  }
  auto channel = listener_->accept(Clock::now() + kWatch);
  if (!channel) return false;
  auto session = std::make_unique<Session>();
  session->channel = std::move(channel);
  session->hello = Clock::now() + kHello;
  const Lock lock(mutex_);
  if (stopping_) return false;
  auto& kept = *sessions_.emplace_back(std::move(session));
  try {
    kept.thread = std::thread([this, &kept] { serve(kept); });
  } catch (const std::system_error& error) {
    sessions_.pop_back();
    throw CommError(std::string("no thread can be made for it (") + error.what() +
                    "), and it is closed; raise the limit of threads (ulimit -u, pids.max)");
  }
  return true;
}

void ParameterServer::expire(Clock::time_point now, Clock::duration since_last) {
  std::vector<uint32_t> dead;
  std::shared_ptr<Shard> shard;
  {
    const Lock lock(mutex_);
    dead = quorum_.expire(now, since_last);
    if (dead.empty()) return;
    shard = shard_;
    for (const auto& session : sessions_) {
      if (session->is_known && std::find(dead.begin(), dead.end(), session->rank) != dead.end()) {
        session->channel->close();
      }
    }
    changed_.notify_all();
  }
  for (const uint32_t rank : dead) {
    {
      const Lock lock(mutex_);
      dealer_.take_back(rank);
    }
    log(LogLevel::warning, "worker " + std::to_string(rank) + " was silent for too long and no longer counts");
    shard->drop_pushes(rank);
  }
  shard->wake();
}

void ParameterServer::reap() {
  std::list<std::unique_ptr<Session>> over;
  {
    const Lock lock(mutex_);
    for (auto session = sessions_.begin(); session != sessions_.end();) {
      const auto next = std::next(session);
      if ((*session)->is_over) over.splice(over.end(), sessions_, session);
      session = next;
    }
  }
  for (const auto& session : over) session->thread.join();
}

void ParameterServer::serve(Session& session) noexcept {
  try {
    net::Frame frame;
    const auto is_late = [&] { return !session.is_known && Clock::now() >= session.hello; };
    while (!session.leaves && !is_late() &&
           session.channel->receive(frame, session.is_known ? Deadline::max() : session.hello)) {
      try {
        answer(session, frame);
      } catch (const Fenced&) {
        reply(session, describe(std::current_exception()));
        break;
      } catch (const std::exception&) {
        reply(session, describe(std::current_exception()));
      }
    }
  } catch (const std::exception& error) {
    const std::string who = session.is_known ? "worker " + std::to_string(session.rank) : "somebody";
    log(LogLevel::debug, "a connection of " + who + " ended: " + error.what());
  }
  session.channel->close();
  session.is_over = true;
}

std::shared_ptr<Shard> ParameterServer::shard() const {
  const Lock lock(mutex_);
  return shard_;
}

// --- snapshots -----------------------------------------------------------------------------------------------------

void ParameterServer::keep_snapshots() noexcept {
  for (;;) {
    {
      Lock lock(snapshots_.mutex);
      snapshots_.changed.wait_for(lock, config_.snapshot_every,
                                  [&] { return snapshots_.is_wanted || snapshots_.stops; });
      if (snapshots_.stops) return;
      snapshots_.is_wanted = false;
    }
    try {
      snapshot();
    } catch (const std::exception& error) {
      log(LogLevel::error, std::string("a snapshot failed, the next one is tried in time: ") + error.what());
    }
  }
}

void ParameterServer::snapshot() {
  const Lock writing(snapshots_.writing);
  Saved saved;
  std::shared_ptr<Shard> shard;
  {
    const Lock lock(mutex_);
    if (!is_filled_ || config_.snapshots.empty()) return;
    shard = shard_;
    saved.configured = {index_, shard->plan(), job_.id, job_.facts};
    saved.configured.plan.workers = quorum_.workers();
    saved.members = quorum_.record();
  }
  checkpoint::Snapshot snapshot;
  std::vector<Pushes::Record> made;
  const auto keep = [&](auto& images, auto image) {
    snapshot.tensors.merge(image.tensors);
    image.tensors.clear();
    made.push_back(image.made);
    images.push_back(std::move(image));
  };
  for (const uint32_t chunk : shard->chunks()) keep(saved.images, shard->image(chunk));
  auto& tables = shard->tables();
  for (uint32_t table = 0; table < tables.num_tables(); ++table) keep(saved.tables, tables.image(table));
  {
    // After the chunks: a step that they hold has its batches finished here.
    const Lock lock(mutex_);
    saved.batches = dealer_.record();
  }
  const std::string meta = encode(saved);
  auto& bytes = snapshot.tensors[kMeta];
  bytes = at::empty({static_cast<int64_t>(meta.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), meta.data(), meta.size());
  checkpoint::write_snapshot(config_.snapshots, snapshot, {.keep = kKeep});
  {
    const Lock lock(snapshots_.mutex);
    snapshots_.durable = all_applied(made);
    snapshots_.durable_step = all_made(made);
  }
  const Lock lock(mutex_);
  ++stats_.snapshots;
}

void ParameterServer::restore() {
  const auto snapshot = checkpoint::read_newest_snapshot(config_.snapshots);
  if (!snapshot) return;
  const auto meta = snapshot->tensors.find(kMeta);
  if (meta == snapshot->tensors.end() || meta->second.scalar_type() != at::kByte) {
    throw CheckpointError("the snapshots in " + config_.snapshots.string() +
                          " are not a parameter server's; give it a folder of its own");
  }
  auto saved = decode<Saved>({static_cast<const char*>(meta->second.const_data_ptr()), meta->second.nbytes()});
  const auto& plan = saved.configured.plan;
  plan.validate();
  index_ = saved.configured.server;
  job_.id = saved.configured.job;
  job_.facts = saved.configured.facts;
  shard_ = std::make_shared<Shard>(plan, index_, [this](uint32_t rank, uint64_t step) { return may_push(rank, step); });
  if (saved.images.size() != shard_->chunks().size()) throw CheckpointError("a snapshot's number of chunks is wrong");
  for (size_t i = 0; i < saved.images.size(); ++i) {
    saved.images[i].tensors = snapshot->tensors;
    shard_->restore(shard_->chunks()[i], saved.images[i]);
    saved.images[i].tensors.clear();
  }
  auto& tables = shard_->tables();
  if (saved.tables.size() != tables.num_tables()) throw CheckpointError("a snapshot's number of tables is wrong");
  for (uint32_t table = 0; table < tables.num_tables(); ++table) {
    saved.tables[table].tensors = snapshot->tensors;
    tables.restore(table, saved.tables[table]);
    saved.tables[table].tensors.clear();
  }
  quorum_.configure(rules_of(plan), Clock::now());
  quorum_.restore(saved.members, Clock::now());
  dealer_.restore(saved.batches);
  is_filled_ = started_ = true;
  had_members_ = !saved.members.ranks.empty();
  std::vector<Pushes::Record> made;
  for (const auto& image : saved.images) made.push_back(image.made);
  for (const auto& image : saved.tables) made.push_back(image.made);
  snapshots_.durable_step = all_made(made);
  log(LogLevel::info, "parameter server " + std::to_string(index_) + " goes on after step " +
                          std::to_string(snapshots_.durable_step) + " of its snapshot");
}

}  // namespace muster::server
