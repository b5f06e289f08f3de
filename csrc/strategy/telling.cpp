#include "strategy/telling.h"

#include <exception>

#include "comm/text_exchange.h"
#include "muster/error.h"

namespace muster {

namespace {

// What texts begin with that workers tell each other.
constexpr char kDone = '=';
constexpr char kFailed = '!';
constexpr char kDiffers = '#';  // a LayoutMismatch

}  // namespace

std::vector<std::string> told_by_all(comm::Communicator& workers, const char* what,
                                     const std::function<std::string()>& act) {
  std::string mine;
  std::exception_ptr raised;
  try {
    mine = act();
    mine.insert(mine.begin(), kDone);
  } catch (const std::exception& problem) {
    const bool differs = dynamic_cast<const LayoutMismatch*>(&problem) != nullptr;
    mine = std::string(1, differs ? kDiffers : kFailed) + problem.what();
    raised = std::current_exception();
  }
  std::vector<std::string> told;
  try {
    told = exchange_texts(workers, mine);
  } catch (const Error&) {
    if (!raised) throw;  // else it says less
  }
  if (raised) std::rethrow_exception(raised);
  for (size_t rank = 0; rank < told.size(); ++rank) {
    const char kind = told[rank].empty() ? kFailed : told[rank].front();
    told[rank].erase(0, 1);
    if (kind == kDone) continue;
    const auto text = std::string(what) + "() failed on rank " + std::to_string(rank) + ": " + told[rank];
    if (kind == kDiffers) throw LayoutMismatch(text);
    throw CheckpointError(text);
  }
  return told;
}

}  // namespace muster
