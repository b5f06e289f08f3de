#include "support/message_names.h"

#include <algorithm>
#include <iterator>

#include "server/protocol/protocol.h"

namespace muster::testing {

using namespace server;

namespace {

struct Named {
  uint16_t type;
  const char* name;
  std::string (*of)(const std::string& message) = nullptr;
};

template <class Message>
std::string of_step(const std::string& message) {
  return " of step " + std::to_string(decode<Message>(message).step);
}

template <class Message>
std::string at_least(const std::string& message) {
  return " of at least step " + std::to_string(decode<Message>(message).at_least);
}

std::string of_batches(const std::string& message) {
  const auto deal = decode<Deal>(message);
  return " of pass " + std::to_string(deal.epoch) + (deal.ends ? ", which it leaves" : "");
}

std::string of_join(const std::string& message) {
  const auto join = decode<Join>(message);
  return " after step " + std::to_string(join.step) + (join.returns ? ", back" : "");
}

constexpr Named kNames[] = {
    {Hello::kType, "Hello"},
    {Configure::kType, "Configure"},
    {Write::kType, "Write"},
    {Start::kType, "Start"},
    {Resume::kType, "Resume", of_step<Resume>},
    {Join::kType, "Join", of_join},
    {Push::kType, "Push", of_step<Push>},
    {Commit::kType, "Commit", of_step<Commit>},
    {Decision::kType, "Decision", of_step<Decision>},
    {Sum::kType, "Sum", of_step<Sum>},
    {Apply::kType, "Apply", of_step<Apply>},
    {Read::kType, "Read", at_least<Read>},
    {Beat::kType, "Beat"},
    {Recall::kType, "Recall"},
    {Leave::kType, "Leave"},
    {Deal::kType, "Deal", of_batches},
    {AskPasses::kType, "AskPasses"},
    {PushRows::kType, "PushRows", of_step<PushRows>},
    {PullRows::kType, "PullRows", at_least<PullRows>},
    {WriteRows::kType, "WriteRows"},
    {WriteRowSteps::kType, "WriteRowSteps"},
    {FetchRows::kType, "FetchRows", at_least<FetchRows>},
    {WritePart::kType, "WritePart", of_step<WritePart>},
    {Inquire::kType, "Inquire"},
};

const Named* find(uint16_t type) {
  const auto* const found =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const Named& named) { return named.type == type; });
  return found == std::end(kNames) ? nullptr : found;
}

}  // namespace

std::string name_of_message(uint16_t type) {
  const auto* const named = find(type);
  return named == nullptr ? "message " + std::to_string(type) : named->name;
}

std::string in_words(const net::Frame& request) {
  const auto* const named = find(request.type);
  return name_of_message(request.type) +
         (named == nullptr || named->of == nullptr ? std::string() : named->of(request.message));
}

}  // namespace muster::testing
