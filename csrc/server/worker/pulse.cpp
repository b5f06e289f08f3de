#include "server/worker/pulse.h"

#include <algorithm>
#include <utility>

namespace muster::server {

namespace {

using std::chrono::milliseconds;

constexpr uint32_t kBeatLane = 0xffffffff;
constexpr milliseconds kTickAtLeast{50};
constexpr milliseconds kFramePatience{10};

}  // namespace

Pulse::Pulse(Config config, Surroundings& surroundings, std::function<void(const std::string& why)> on_end)
    : config_(std::move(config)),
      interval_(std::clamp(config_.heartbeat / 5, milliseconds(1), milliseconds(500))),
      slice_(std::min(interval_, kTickAtLeast)),
      surroundings_(surroundings),
      on_end_(std::move(on_end)) {}

void Pulse::note_welcome(uint64_t incarnation) noexcept {
  incarnation_ = incarnation;
  is_welcome_ = true;
}

void Pulse::note_durable(const Durable& durable) noexcept {
  const auto raise_to = [](std::atomic<uint64_t>& known_step, uint64_t step) {
    uint64_t known = known_step;
    while (known < step && !known_step.compare_exchange_weak(known, step)) {
    }
  };
  raise_to(durable_, durable.all);
  raise_to(newest_, durable.newest);
}

Pulse::Next Pulse::tick(TimePoint now) noexcept {
  if (is_welcome_.exchange(false)) alive_ = now;
  try {
    if (state_ == State::apart && now >= since_) connect(now);
    // Answers before deadlines: who stood still finds them there.
    while (state_ != State::apart && channel_->wait_input(now)) take_answer(now);
    check_silence(now);
    if (state_ == State::resting && (wants_snapshot_ || now >= since_ + interval_)) {
      channel_->send(Beat::kType, encode(Beat{wants_snapshot_.exchange(false)}), {}, now);
      state_ = State::waiting;
      since_ = now;
    }
  } catch (const std::exception& error) {
    lose(now, error.what());
  }
  return next(now);
}

void Pulse::connect(TimePoint now) {
  channel_ = surroundings_.connect(config_.name, nullptr, now);
  channel_->send(Hello::kType, encode(Hello{config_.rank, kBeatLane, incarnation_, config_.token, config_.takes_over}),
                 {}, now);
  state_ = State::greeting;
  since_ = now;
}

void Pulse::take_answer(TimePoint now) {
  net::Frame frame;
  if (!channel_->receive(frame, now + kFramePatience)) throw CommError("it ended the connection");
  if (state_ == State::resting) throw CommError("it sent what was not asked for");
  if (state_ == State::greeting) {
    if (frame.type == Busy::kType) {
      alive_ = now;
      throw CommError("it reads its snapshot");
    }
    if (frame.type == Refusal::kType) raise(decode<Refusal>(frame.message));
    if (frame.type != Welcome::kType) throw CommError("it sent what was not asked for");
    since_ = now - interval_;  // the first sign of life is due
  } else {
    if (frame.type == Beaten::kType) note_durable(decode<Beaten>(frame.message).durable);
    alive_ = since_ = now;
  }
  state_ = State::resting;
}

void Pulse::check_silence(TimePoint now) const {
  const bool awaits = state_ == State::greeting || state_ == State::waiting;
  if (awaits && now >= since_ + config_.heartbeat) throw Timeout("it gave no answer within the heartbeat's time");
}

void Pulse::lose(TimePoint now, const std::string& why) {
  const bool was_greeted = state_ == State::waiting || state_ == State::resting;
  channel_.reset();
  state_ = State::apart;
  since_ = now + slice_;
  if (was_greeted || now >= alive_ + config_.heartbeat) on_end_(why);
}

Pulse::Next Pulse::next(TimePoint now) const noexcept {
  switch (state_) {
    case State::apart:
      return {since_, -1};
    case State::resting:
      return {std::min(now + slice_, since_ + interval_), channel_->descriptor()};
    default:
      return {std::min(now + slice_, since_ + config_.heartbeat), channel_->descriptor()};
  }
}

}  // namespace muster::server
