#include "server/worker/surroundings.h"

#include <thread>
#include <utility>

#include "server/worker/heart.h"

namespace muster::server {

namespace {

class SurroundingsOfProcess final : public Surroundings {
 public:
  Clock::time_point now() override { return Clock::now(); }
  void sleep(std::chrono::milliseconds duration) override { std::this_thread::sleep_for(duration); }
  std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> memory,
                                        net::Deadline deadline) override {
    return net::connect_on_host(name, std::move(memory), deadline);
  }
  void start(Pulse& pulse) override { Heart::of_process().start(pulse); }
  void stop(Pulse& pulse) noexcept override { Heart::of_process().stop(pulse); }
};

}  // namespace

const std::shared_ptr<Surroundings>& Surroundings::of_process() {
  // Never destroyed: links may live until the process exits.
  static const auto* const own = new std::shared_ptr<Surroundings>(std::make_shared<SurroundingsOfProcess>());
  return *own;
}

}  // namespace muster::server
