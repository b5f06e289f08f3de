#include "server/worker/link.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace muster::server {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMaxUnderWay = 32;  // on a lane: their answers fit into a socket's buffer
constexpr uint32_t kBeatLane = 0xffffffff;
constexpr milliseconds kSlice{50};
constexpr milliseconds kSendPatience{60'000};  // of one send

}  // namespace

Link::Link(Config config) : config_(std::move(config)), lanes_(config_.lanes + 1) {}

Link::~Link() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    for (const auto& channel : open_) channel->close();
    if (beats_) beats_->close();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Link::refuse(uint16_t type) {
  throw CommError("a server answered with a message of type " + std::to_string(type) +
                  " that was not asked for; run one version of Muster on all workers and servers");
}

void Link::break_with(const std::string& what) {
  close_lanes();
  throw LinkBroken(what);
}

void Link::close_lanes() noexcept {
  const std::lock_guard lock(mutex_);
  broken_ = true;
  for (const auto& channel : open_) channel->close();
}

void Link::disconnect() noexcept {
  close_lanes();
  for (auto& lane : lanes_) lane = Lane{};
  const std::lock_guard lock(mutex_);
  open_.clear();
}

std::shared_ptr<net::Channel> Link::greet(uint32_t lane, uint64_t& incarnation,
                                          const std::shared_ptr<net::Arena>& memory) {
  const auto deadline = Clock::now() + config_.heartbeat;
  const std::shared_ptr<net::Channel> channel = net::connect_on_host(config_.name, memory, deadline);
  channel->send(Hello::kType, encode(Hello{config_.rank, lane, incarnation}), {}, deadline);
  net::Frame frame;
  if (!channel->receive(frame, deadline)) throw CommError("server '" + config_.name + "' ended the connection");
  const auto welcome = expect<Welcome>(frame);
  incarnation = welcome.incarnation;
  life_ = welcome.life;
  return channel;
}

uint64_t Link::connect(uint64_t incarnation, const std::shared_ptr<net::Arena>& memory) {
  disconnect();
  ++connects_;
  try {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      lanes_[lane].channel = greet(lane, incarnation, memory);
      const std::lock_guard lock(mutex_);
      open_.push_back(lanes_[lane].channel);
    }
  } catch (const Fenced&) {
    throw;
  } catch (const CommError& error) {
    break_with(error.what());
  }
  incarnation_ = incarnation;
  broken_ = false;
  return incarnation;
}

bool Link::has_ended() {
  for (size_t index = 1; index < lanes_.size() && !broken_; ++index) {
    const auto& lane = lanes_[index];
    if (lane.under_way.empty() && lane.channel && lane.channel->wait_input(Clock::now())) close_lanes();
  }
  return broken_;
}

void Link::keep_alive() {
  thread_ = std::thread([this] { beat(); });
}

void Link::beat() noexcept {
  const milliseconds interval = std::max(milliseconds(1), std::min(config_.heartbeat / 5, milliseconds(500)));
  auto alive = Clock::now();
  std::shared_ptr<net::Channel> channel;
  const auto keep = [&](std::shared_ptr<net::Channel> next) {
    const std::lock_guard lock(mutex_);
    channel = next;
    beats_ = std::move(next);
  };
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (!channel) changed_.wait_for(lock, std::min(interval, kSlice), [&] { return stops_; });
      if (stops_) return;
    }
    try {
      if (!channel) {
        uint64_t incarnation = incarnation_;
        keep(greet(kBeatLane, incarnation, nullptr));
      }
      const auto deadline = Clock::now() + config_.heartbeat;
      channel->send(Beat::kType, encode(Beat{wants_snapshot_.exchange(false)}), {}, deadline);
      net::Frame frame;
      if (!channel->receive(frame, deadline)) throw CommError("it ended the connection");
      if (frame.type == Beaten::kType) note_durable(expect<Beaten>(frame).durable);
      alive = Clock::now();
      // Between two beats nothing comes but the end.
      while (!wants_snapshot_ && Clock::now() - alive < interval) {
        if (channel->wait_input(std::min(alive + interval, Clock::now() + kSlice))) {
          throw CommError("it ended the connection");
        }
      }
    } catch (const std::exception& error) {
      const bool was_alive = channel != nullptr;
      if (was_alive) log(LogLevel::debug, "server '" + config_.name + "' gives no sign of life: " + error.what());
      keep(nullptr);
      if (was_alive || Clock::now() - alive > config_.heartbeat) close_lanes();
    }
  }
}

void Link::note_durable(uint64_t step) noexcept {
  uint64_t known = durable_;
  while (known < step && !durable_.compare_exchange_weak(known, step)) {
  }
}

void Link::send(size_t lane, uint16_t type, std::string_view message, std::span<const net::Bytes> payload) {
  if (broken_) break_with("the connection is broken");
  try {
    lanes_[lane].channel->send(type, message, payload, Clock::now() + kSendPatience);
  } catch (const CommError& error) {
    break_with(error.what());
  }
}

net::Frame Link::receive(size_t lane, std::span<std::byte> to, const std::function<void()>& between) {
  net::Frame frame;
  const auto channel = lanes_[lane].channel;
  while (!has_input(channel.get())) {
    try {
      between();
    } catch (...) {  // the answer would be taken for that of a later request
      close_lanes();
      throw;
    }
  }
  try {
    const auto place = [&](uint16_t, const std::string&, uint64_t bytes) {
      return bytes == to.size() ? to : std::span<std::byte>();
    };
    if (channel->receive(frame, Clock::now() + kSendPatience, place)) return frame;
  } catch (const CommError& error) {
    break_with(error.what());
  }
  break_with("the server ended the connection");
}

bool Link::has_input(const net::Channel* channel) {
  if (broken_ || channel == nullptr) break_with("the connection is broken");
  try {
    return channel->wait_input(Clock::now() + kSlice);
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
