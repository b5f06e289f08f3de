#include "server/worker/link.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/log.h"
#include "core/wait_hook.h"

namespace muster::server {

namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxUnderWay = 32;  // on a lane: their answers fit into a socket's buffer
constexpr milliseconds kSlice{50};
constexpr milliseconds kSendPatience{60'000};  // of one send

}  // namespace

Link::Link(Config config)
    : config_(std::move(config)),
      process_(::getpid()),
      lanes_(config_.lanes + 1),
      pulse_({config_.name, config_.rank, config_.heartbeat, config_.token, config_.takes_over}, *config_.surroundings,
             [this](const std::string& why) { close_lanes(why); }) {}

Link::~Link() {
  if (!is_own()) return;  // the parent's mutexes may be locked for ever
  if (is_kept_alive_) config_.surroundings->stop(pulse_);
  close_lanes({});
}

void Link::refuse(uint16_t type) {
  throw CommError("a server answered with a message of type " + std::to_string(type) +
                  " that was not asked for; run one version of Muster on all workers and servers");
}

void Link::break_with(const std::string& what) {
  if (!is_own()) {
    throw CommError("a forked child has no connections to the parameter servers of its parent; ask them in the parent");
  }
  close_lanes({});
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    why.swap(end_);
  }
  if (why.empty()) throw LinkBroken(what);
  log(LogLevel::debug, "server '" + config_.name + "' gives no sign of life: " + why);
  throw LinkSilent(what + "; " + why);
}

bool Link::is_own() const noexcept { return ::getpid() == process_; }

bool Link::is_broken() const noexcept { return broken_ || !is_own(); }

void Link::close_lanes(const std::string& why) noexcept {
  if (!is_own()) return;
  const std::lock_guard lock(mutex_);
  if (end_.empty()) end_ = why;
  broken_ = true;
  for (const auto& channel : open_) channel->close();
}

void Link::disconnect() noexcept {
  close_lanes({});
  for (auto& lane : lanes_) lane = Lane{};
  const std::lock_guard lock(mutex_);
  open_.clear();
  end_.clear();
}

std::shared_ptr<net::Channel> Link::greet(uint32_t lane, uint64_t& incarnation,
                                          const std::shared_ptr<net::Arena>& memory,
                                          const std::function<void()>& between) {
  const auto deadline = in(config_.heartbeat);
  const std::shared_ptr<net::Channel> channel = config_.surroundings->connect(config_.name, memory, deadline);
  channel->send(Hello::kType, encode(Hello{config_.rank, lane, incarnation, config_.token, config_.takes_over}), {},
                deadline);
  bool has_come = false;
  const auto comes = [&] { return has_come = channel->wait_input(std::min(deadline, in(kSlice))); };
  while (!comes() && config_.surroundings->now() < deadline) between();
  // It may have come while `between` was busy for longer.
  const auto patience = has_come ? std::max(deadline, in(kSlice)) : deadline;
  net::Frame frame;
  if (!channel->receive(frame, patience)) throw CommError("server '" + config_.name + "' ended the connection");
  if (frame.type == Busy::kType) {
    const auto busy = decode<Busy>(frame.message);
    const auto percent = busy.total > 0 ? 100 * busy.done / busy.total : 0;
    throw LinkBusy("it reads its snapshot (" + std::to_string(percent) + " %)");
  }
  const auto welcome = expect<Welcome>(frame);
  incarnation = welcome.incarnation;
  life_ = welcome.life;
  return channel;
}

uint64_t Link::connect(uint64_t incarnation, const std::shared_ptr<net::Arena>& memory,
                       const std::function<void()>& between) {
  disconnect();
  ++connects_;
  std::exception_ptr of_between;
  const auto noting_errors = [&] {
    try {
      between();
    } catch (...) {
      of_between = std::current_exception();
      throw;
    }
  };
  try {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      lanes_[lane].channel = greet(lane, incarnation, memory, noting_errors);
      const std::lock_guard lock(mutex_);
      open_.push_back(lanes_[lane].channel);
    }
  } catch (const Fenced&) {
    throw;
  } catch (const Occupied&) {
    close_lanes({});
    throw;
  } catch (const LinkBusy&) {
    close_lanes({});
    throw;
  } catch (const Timeout& error) {
    close_lanes({});
    if (of_between) throw;
    throw LinkSilent(error.what());
  } catch (const CommError& error) {
    if (of_between) std::rethrow_exception(of_between);
    break_with(error.what());
  }
  pulse_.note_welcome(incarnation);
  broken_ = false;
  return incarnation;
}

bool Link::has_ended() {
  for (size_t index = 1; index < lanes_.size() && !is_broken(); ++index) {
    const auto& lane = lanes_[index];
    if (lane.under_way.empty() && lane.channel && lane.channel->wait_input(config_.surroundings->now()))
      close_lanes({});
  }
  return is_broken();
}

void Link::keep_alive() {
  config_.surroundings->start(pulse_);
  is_kept_alive_ = true;
}

void Link::send(size_t lane, uint16_t type, std::string_view message, std::span<const net::Bytes> payload) {
  if (is_broken()) break_with("the connection is broken");
  try {
    lanes_[lane].channel->send(type, message, payload, in(kSendPatience));
  } catch (const CommError& error) {
    break_with(error.what());
  } catch (const InvalidArgument&) {  // nothing was sent
    throw;
  } catch (...) {  // what the WaitHook throws cuts the frame
    close_lanes({});
    throw;
  }
}

net::Frame Link::receive(size_t lane, std::span<std::byte> to, const std::function<void()>& between) {
  net::Frame frame;
  const auto channel = lanes_[lane].channel;
  const uint64_t connects = connects_;
  while (!has_input(channel.get())) {
    try {
      between();
    } catch (...) {  // the answer would be taken for that of a later request
      close_lanes({});
      throw;
    }
    if (connects_ != connects) throw LinkBroken("the connection was made anew");
  }
  try {
    const auto place = [&](uint16_t, const std::string&, uint64_t bytes) {
      return bytes == to.size() ? to : std::span<std::byte>();
    };
    if (channel->receive(frame, in(kSendPatience), place)) return frame;
  } catch (const CommError& error) {
    break_with(error.what());
  }
  break_with("the server ended the connection");
}

bool Link::has_input(const net::Channel* channel) {
  if (is_broken() || channel == nullptr) break_with("the connection is broken");
  try {
    return channel->wait_input(in(kSlice));
  } catch (const CommError& error) {
    break_with(error.what());
  }
}

void Link::send_chunk(uint32_t chunk, uint16_t type, std::string_view message, std::span<const net::Bytes> payload,
                      std::span<std::byte> to, Answer done, const std::function<void()>& between) {
  const size_t index = 1 + chunk % config_.lanes;
  auto& lane = lanes_[index];
  while (lane.under_way.size() >= kMaxUnderWay) take_answer(lane, index, between);
  send(index, type, message, payload);
  lane.under_way.push_back({to, std::move(done)});
}

void Link::take_answer(Lane& lane, size_t index, const std::function<void()>& between) {
  const net::Frame frame = receive(index, lane.under_way.front().to, between);
  const auto done = std::move(lane.under_way.front().done);
  lane.under_way.pop_front();
  done(frame);
}

void Link::drain_lane(uint32_t chunk, const std::function<void()>& between) {
  const size_t index = 1 + chunk % config_.lanes;
  while (!lanes_[index].under_way.empty()) take_answer(lanes_[index], index, between);
}

void Link::drain(const std::function<void()>& between) {
  for (size_t index = 1; index < lanes_.size(); ++index) {
    auto& lane = lanes_[index];
    while (!lane.under_way.empty()) take_answer(lane, index, between);
  }
}

size_t Link::under_way() const noexcept {
  size_t count = 0;
  for (const auto& lane : lanes_) count += lane.under_way.size();
  return count;
}

}  // namespace muster::server
