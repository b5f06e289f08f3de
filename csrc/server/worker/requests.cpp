#include "server/worker/requests.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/log.h"
#include "core/wait_hook.h"
#include "muster/error.h"
#include "server/protocol/address.h"
#include "server/worker/absence.h"
#include "server/worker/resume_point.h"

namespace muster::server {

using std::chrono::milliseconds;

namespace {

// A server started again while the chief told all servers with what the job begins.
struct StartedAgain final : PeerLost {
  using PeerLost::PeerLost;
};

}  // namespace

Requests::Requests(const ClientConfig& config, Replay& replay, std::shared_ptr<net::Arena> memory)
    : config_(config), replay_(replay), memory_(std::move(memory)), healing_(config.servers.size()) {
  for (const auto& name : config_.servers) {
    links_.push_back(
        std::make_unique<Link>(Link::Config{name, config_.rank, config_.lanes, milliseconds(config_.plan.heartbeat_ms),
                                            config_.surroundings, config_.token, config_.takes_over}));
  }
  configured_.resize(links_.size());
  try {
    connect_all();
  } catch (...) {
    give_up();
    throw;
  }
}

void Requests::connect_all() {
  for (size_t s = 0; s < links_.size(); ++s) {
    connect(s, /*is_first=*/true);
    links_[s]->keep_alive();
  }
  const auto is_new = [](const Configured& server) { return !server.started || server.is_untouched; };
  const auto is_started = [](const Configured& server) { return server.started; };
  // Who joins a job has no values to give: somebody may step the servers' at any time.
  const bool gives_values = config_.rank == kChief && !config_.joins;
  if (gives_values && std::all_of(configured_.begin(), configured_.end(), is_new)) return;
  is_started_ = std::all_of(configured_.begin(), configured_.end(), is_started);
  // While the chief starts a job, others may see half of it.
  if (config_.rank == kChief || config_.joins) check_started();
  if (config_.joins && !is_started_) lose(0, "it started again without what it was given");
}

std::string Requests::name_of(size_t server) const { return name_of_server(server, config_.servers[server]); }

void Requests::check_started() const {
  const auto is_started = [](const Configured& server) { return server.started; };
  const auto started = std::find_if(configured_.begin(), configured_.end(), is_started);
  const auto empty = std::find_if_not(configured_.begin(), configured_.end(), is_started);
  if (started == configured_.end()) return;
  if (empty == configured_.end()) return check_origins();
  const auto e = static_cast<size_t>(empty - configured_.begin());
  const auto s = static_cast<size_t>(started - configured_.begin());
  throw CheckpointError(name_of(e) + " holds nothing, and " + name_of(s) + " goes on after step " +
                        std::to_string(started->made) + "; give server " + std::to_string(e) +
                        " its folder of snapshots, or move the folders of all servers away to begin anew");
}

// A job that loaded a checkpoint may have ended before all servers had it.
void Requests::check_origins() const {
  for (size_t s = 1; s < configured_.size(); ++s) {
    if (configured_[s].origin == configured_.front().origin) continue;
    throw CheckpointError(name_of(0) + " and " + name_of(s) +
                          " hold what came of the values of different jobs, as where one loaded a checkpoint and ended "
                          "before all servers had it; load it again, or give all servers the folders of one job");
  }
}

// Server 0 is told last: what it remembers of the job's beginning after it started again, all others have on disk.
void Requests::begin(const std::function<void()>& tell, bool gives_values) {
  const auto deadline = limit();
  for (bool is_repeated = false;; is_repeated = true) {
    try {
      for (size_t s = 0; s < links_.size(); ++s) {
        if (links_[s]->is_broken()) connect(s, /*is_first=*/false);
      }
      const auto& first = configured_.front();
      const bool is_told = first.started && first.is_settled && (!gives_values || first.origin == config_.job);
      if (is_repeated && is_told) {
        for (const auto& link : links_) link->disconnect();  // others are told when this worker returns to them
      } else {
        tell();
      }
      break;
    } catch (const StartedAgain&) {
      if (config_.surroundings->now() > deadline) throw;
    }
  }
  is_started_ = is_running_ = true;
}

void Requests::resume() {
  if (is_running_) return;
  begin(
      [this] {
        check_started();
        for (size_t s = 0; s < links_.size(); ++s) {
          if (!configured_[s].started) lose(s, "it started again without what it was given");
        }
        settle();
      },
      /*gives_values=*/false);
}

void Requests::settle() {
  const auto is_settled = [](const Configured& server) { return server.is_settled; };
  if (std::all_of(configured_.begin(), configured_.end(), is_settled)) return;
  if (!config_.plan.is_synchronous()) return tell_all(Resume{});
  const auto goes_on = [&](uint64_t step) {
    log(LogLevel::info, "the job goes on after step " + std::to_string(step) + ", on all parameter servers");
  };
  const ResumePoint point(configured_);
  if (const auto newest = point.newest()) {
    try {
      if (!newest->command.empty()) call_all<Done>(*newest);
      tell_all(Resume{newest->step, {}});
      return goes_on(newest->step);
    } catch (const CheckpointError&) {
      log(LogLevel::info, "not all parameter servers have step " + std::to_string(newest->step));
    }
  }
  if (const auto common = point.common()) {
    tell_all(Resume{*common, {}});
    return goes_on(*common);
  }
  std::string text;
  for (size_t s = 0; s < configured_.size(); ++s) text += name_of(s) + " has " + point.in_words(s) + "; ";
  throw CheckpointError("the parameter servers have no step in common: " + text +
                        "give them the folders of one job, or move the folders of all of them away to begin anew");
}

void Requests::check_snapshots() {
  for (size_t s = 0; s < links_.size(); ++s) {
    const auto beaten = call<Beaten>(s, Beat{/*wants_snapshot=*/true});
    links_[s]->note_durable(beaten.durable);
    if (beaten.failures < Beaten::kTooMany) continue;
    throw CheckpointError(name_of(s) +
                          " cannot write its snapshots, and this worker keeps no more of what it pushed (" +
                          std::to_string(config_.log_bytes >> 20) + " MB): " + beaten.trouble);
  }
}

void Requests::note_applied(const std::vector<Applied>& answers) {
  for (size_t s = 0; s < links_.size(); ++s) links_[s]->note_durable(answers[s].durable);
  replay_.log().release(durable().all);
  batches_.release(links_.front()->durable().all);
}

void Requests::note_decision(const Decision& decision) {
  last_decision_ = decision;
  if (decision.cut.is_due) last_cut_ = decision.step;
}

Durable Requests::durable() const noexcept {
  Durable least = links_.front()->durable();
  for (const auto& link : links_) {
    least.all = std::min(least.all, link->durable().all);
    least.newest = std::min(least.newest, link->durable().newest);
  }
  return least;
}

Requests::Clock::time_point Requests::limit() const {
  return config_.surroundings->now() + milliseconds(config_.plan.timeout_ms) * 3 / 2;
}

void Requests::wait_a_slice(Clock::time_point deadline) {
  if (config_.surroundings->now() > deadline) {
    throw Timeout("the parameter servers did not answer within the timeout; look at their logs and the other workers'");
  }
  WaitHook::call();
}

std::function<void()> Requests::between() {
  return [this, deadline = limit()] {
    wait_a_slice(deadline);
    heal();
  };
}

// Others wait at server 0 until it knows that this worker is back: nothing else is done meanwhile.
std::function<void()> Requests::between_returning(size_t server) {
  if (server != 0) return between();
  return [this, deadline = limit()] { wait_a_slice(deadline); };
}

// Another server may wait for what this worker has to push again.
void Requests::heal() {
  if (!has_joined_) return;
  for (size_t s = 0; s < links_.size(); ++s) {
    if (!healing_[s] && links_[s]->has_ended()) recover(s);
  }
}

void Requests::lose(size_t server, const std::string& why) {
  has_lost_one_ = true;
  server::lose(config_, server, why);
}

void Requests::connect(size_t server, bool is_first) {
  auto& link = *links_[server];
  const auto now = [this] { return config_.surroundings->now(); };
  Absence absence(now(), config_.patience);
  // Members of a job that was killed give no signs of life soon.
  const auto free_by = now() + milliseconds(config_.plan.heartbeat_ms) + config_.patience;
  const uint64_t life = link.life();
  std::string why = "nobody listens there";
  // Whoever asks server 0 next has to push again what it lacks.
  const auto done = std::shared_ptr<void>(nullptr, [this](void*) {
    if (std::exchange(is_first_told_, false)) links_.front()->disconnect();
  });
  for (;;) {
    const auto asked_at = now();
    try {
      const auto configured = try_to_connect(server);
      if (!is_running_) configured_[server] = configured;
      if (!is_first) check_lives(server, link.life() != life, configured);
      return;
    } catch (const Occupied& occupied) {
      if (!is_first) throw Fenced("another job has ended this worker's: " + std::string(occupied.what()));
      if (asked_at > free_by) throw;  // an answer may have waited for this worker for long
      absence.note_busy(free_by);
    } catch (const LinkBusy& busy) {
      absence.note_busy(now());
      why = busy.what();
    } catch (const LinkSilent& silent) {
      absence.note_silent();
      why = silent.what();
    } catch (const LinkBroken& error) {
      absence.note_gone(now());
      why = error.what();
    }
    if (absence.is_over(now())) lose(server, why);
    config_.surroundings->sleep(kBetweenTries);
    WaitHook::call();
    if (server != 0) return_to_first();
  }
}

Configured Requests::try_to_connect(size_t server) {
  auto& link = *links_[server];
  incarnation_ = link.connect(incarnation_, memory_, [&] {
    WaitHook::call();
    if (server != 0) return_to_first();
  });
  Configure configure{static_cast<uint32_t>(server), config_.plan, config_.job, config_.facts};
  using Coming = Configure::Coming;
  configure.coming = is_running_           ? Coming::returns
                     : config_.joins       ? Coming::joins
                     : config_.begins_anew ? Coming::begins_anew
                                           : Coming::begins;
  link.send(configure);
  return link.receive<Configured>(between_returning(server));
}

// Another server may be away, or stand still, for longer than server 0, started again, waits for those whom its
// snapshot does not know. What that one lacks is pushed later: others may have to bring something before this worker
// can go on.
void Requests::return_to_first() {
  if (!has_joined_ || healing_.front() || !links_.front()->has_ended()) return;
  healing_.front() = true;
  const auto done = std::shared_ptr<void>(nullptr, [&](void*) { healing_.front() = false; });
  try {
    if (try_to_connect(0).started) {
      join_again(0);
      is_first_told_ = true;
    } else {
      links_.front()->disconnect();  // who asks it next says so
    }
  } catch (const LinkBroken&) {
    return;  // it is tried again
  }
}

void Requests::join_again(size_t server) {
  auto& link = *links_[server];
  if (server == 0 && last_decision_) {
    link.send(*last_decision_);
    link.receive<Done>(between_returning(server));
  }
  Join join{joined_at_, /*returns=*/true, replay_.log().first_step()};
  if (server == 0) {
    join.held = batches_.held();
    join.finished = batches_.finished();
  }
  link.send(join);
  link.receive<Joined>(between_returning(server));
}

// Before the job runs its chief tells a server again what it has forgotten, and the others wait for that.
void Requests::check_lives(size_t server, bool has_started_again, const Configured& configured) {
  if (!configured.started && (is_running_ || config_.joins)) {
    lose(server, "it started again without what it was given");
  }
  if (!has_started_again || is_running_ || config_.joins || config_.rank != kChief) return;
  throw StartedAgain(-1, name_of(server) + " started again while the job began; start all workers again");
}

void Requests::recover(size_t server) {
  healing_[server] = true;
  const auto done = std::shared_ptr<void>(nullptr, [&](void*) { healing_[server] = false; });
  const auto deadline = limit();
  for (;;) {
    try {
      connect(server, /*is_first=*/false);
      if (has_joined_) {
        join_again(server);
        replay_.resend(server, *links_[server], joined_at_, [this] { return between(); });
      }
      return;
    } catch (const LinkBroken& error) {
      if (config_.surroundings->now() > deadline) lose(server, error.what());
    }
  }
}

void Requests::ask_all(const std::vector<size_t>& counts, const std::function<void(size_t, size_t)>& ask) {
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

PushLog::Entry& Requests::entry_of(uint64_t step) {
  replay_.log().release(durable().all);
  if (auto* known = replay_.log().find(step)) return *known;
  // Where steps are made together none is cut before the last cut is complete, nor the one before this after it was
  // decided: when this worker found the log full a cut may have been under way.
  bool has_waited = false;
  return *wait_for_log([&] {
    const bool beyond_bound =
        std::exchange(has_waited, true) && config_.plan.is_synchronous() && durable().newest >= last_cut_;
    return replay_.log().open(step, beyond_bound);
  });
}

// A server that went away before all was in its snapshots comes back, and lacks what this worker alone has.
void Requests::leave() {
  const bool is_needed = has_joined_ && durable().newest + 1 < replay_.log().first_step_after();
  if (is_needed && !has_lost_one_) {
    call_all<Done>(Leave{});
    return;
  }
  tell_leave([] { WaitHook::call(); });
}

void Requests::give_up() noexcept {
  const auto deadline = config_.surroundings->now() + milliseconds(config_.plan.heartbeat_ms);
  try {
    tell_leave([&] {
      if (config_.surroundings->now() > deadline) throw Timeout("a parameter server does not answer");
    });
  } catch (...) {
    return;  // servers know by the silence
  }
}

void Requests::tell_leave(const std::function<void()>& between) {
  const auto each = [&](const auto& what) {
    for (const auto& link : links_) {
      try {
        if (!link->is_broken()) what(*link);
      } catch (const LinkBroken&) {
        continue;  // it knows by the silence
      }
    }
  };
  each([](Link& link) { link.send(Leave{}); });
  each([&](Link& link) { link.receive<Done>(between); });
}

}  // namespace muster::server
