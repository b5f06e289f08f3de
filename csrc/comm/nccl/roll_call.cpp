#include "comm/nccl/roll_call.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "muster/error.h"

namespace muster::comm::nccl {
namespace {

// A scope of fewer operations is no shorter by a script, since its first one and its end are agreed on. Something
// queued leaves earlier by any.
constexpr size_t kFewestLines = 3;

Roll roll_of(const Cards& cards) {
  std::vector<std::optional<Request>> requests;
  for (const auto& card : cards) requests.push_back(card ? std::optional(card->request) : std::nullopt);
  return Roll(std::move(requests));
}

bool have_same_script(const Cards& cards) {
  return std::all_of(cards.begin(), cards.end(),
                     [&](const auto& card) { return card && card->script != 0 && card->script == cards[0]->script; });
}

// "type: text", as Communicator::end_scope has reasons.
std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return c10::demangle(typeid(e).name()) + ": " + e.what();
  } catch (...) {
    return "unknown exception: ";
  }
}

}  // namespace

/// Of one RollCall, which outlives it.
class RollCall::EndWork final : public Work::Impl {
 public:
  explicit EndWork(RollCall& roll_call) : roll_call_(roll_call) {}
  bool advance() override {
    if (is_over_) wait({});
    return is_over_;
  }
  void wait(Milliseconds /*timeout*/) override {
    if (!std::exchange(is_over_, true)) roll_call_.finish_scope();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  /// Waits at once, and throws later.
  void finish_now() noexcept {
    try {
      wait({});
    } catch (...) {
      error_ = std::current_exception();
    }
  }

 private:
  RollCall& roll_call_;
  bool is_over_ = false;
  std::exception_ptr error_;
};

RollCall::RollCall(std::shared_ptr<Clique> clique, CommunicatorPtr control, StandIn stand_in)
    : clique_(std::move(clique)), control_(std::move(control)), stand_in_(std::move(stand_in)) {}

Card RollCall::card_of(const Request& request) const {
  Card card{request};
  card.number = static_cast<int64_t>(open_.record.lines.size());
  if (open_.queue != nullptr) {
    card.num_issued = open_.queue->num_issued();
    card.num_ready = open_.queue->num_ready();
  }
  return card;
}

// A group that takes no more cards has ended.
Work RollCall::post(const Card& mine) {
  try {
    return control_->all_gather(to_tensor(mine), GatherSizes::equal);
  } catch (...) {
    clique_->fail(std::current_exception());
    throw;
  }
}

Cards RollCall::await(Work work, const std::string& what) {
  Cards cards;
  try {
    work.wait(clique_->options().timeout);
    for (const at::Tensor& card : work.outputs()) {
      cards.push_back(card.defined() ? std::optional(card_in(card)) : std::nullopt);
    }
  } catch (const RemoteError& error) {
    const std::string who = "rank " + std::to_string(error.replica());
    std::rethrow_exception(failed_in_scope(error.rank(), error.replica(), who, what,
                                           error.type().empty() ? error.text() : error.type() + ": " + error.text()));
  } catch (const LayoutMismatch& error) {
    if (scope_ == 0) clique_->fail(std::current_exception());
    throw LayoutMismatch(what + ": " + error.what());
  } catch (...) {
    clique_->fail(std::current_exception());
    throw;
  }
  check(cards);
  return cards;
}

// What differs is thrown on every rank, in a scope before anything is launched.
void RollCall::check(const Cards& cards) {
  const std::string mismatch = find_mismatch(cards);
  if (mismatch.empty()) return;
  if (scope_ != 0) throw LayoutMismatch(mismatch);
  clique_->fail(std::make_exception_ptr(LayoutMismatch(mismatch)));
  clique_->check();
}

Roll RollCall::compare(const Cards& cards) {
  check(cards);
  return roll_of(cards);
}

Roll RollCall::call(Request& request, GatherSizes sizes) {
  request.scope = scope_;
  return scope_ == 0 ? roll_of(await(post(Card{request}), describe(request))) : call_in_scope(request, sizes);
}

Roll RollCall::call_in_scope(const Request& request, GatherSizes sizes) {
  issue_given_up();
  Line line = line_of(request, sizes);
  auto& lines = open_.record.lines;
  const bool is_first = lines.empty();
  auto script = is_first ? scripts_.find(open_.record.has_queue, line) : open_.script;
  const bool is_scripted = script && lines.size() < script->lines.size() && script->lines[lines.size()].asks_for(line);
  if (script && !is_scripted) {
    issue_stand_ins();
    script = open_.script = nullptr;
  }
  if (open_.queue != nullptr) open_.queue->hold();
  Card mine = card_of(request);
  open_.num_ready = mine.num_ready;
  open_.num_leaving = 0;
  if (script && !is_first && !script->lines[lines.size()].meets) {
    lines.push_back(line);
    open_.roll = Roll(request, control_->size());
    return open_.roll;
  }
  if (script) mine.script = script->digest;
  const Cards cards = await(post(mine), describe(request));
  open_.script = have_same_script(cards) ? script : nullptr;
  open_.roll = roll_of(cards);
  if (open_.queue != nullptr) open_.queue->issue(most_issued(cards));  // before this operation, as some have
  // A rank that is absent issues what is queued once it has ended the scope.
  const bool is_everyone = open_.roll.is_everyone();
  open_.has_everyone &= is_everyone;
  open_.num_leaving = is_everyone ? least_ready(cards) : 0;
  line.meets |=
      open_.num_leaving > most_issued(cards) || (request.kind == OpKind::all_gather && !open_.roll.has_equal_sizes());
  lines.push_back(line);
  return open_.roll;
}

void RollCall::note_issued() noexcept {
  if (scope_ == 0) return;
  note_posted();
  if (open_.queue == nullptr) return;
  open_.queue->issue(open_.num_leaving);
  open_.num_issued = open_.queue->num_issued();
  if (open_.script && open_.num_posted == open_.script->lines.size()) open_.queue->let_go();
}

// --- stand-ins -----------------------------------------------------------------------------------------------------

// Where there is none a peer's device would wait for ever: that ends the group.
void RollCall::stand_in(const Request& request, const Roll& roll) {
  try {
    stand_in_(request, roll);
  } catch (...) {
    clique_->fail(std::make_exception_ptr(CommError("no stand-in could be issued for " + describe(request) +
                                                    ", which peers wait for: " + words_of(std::current_exception()))));
    clique_->check();
  }
}

// What was agreed on and then not issued: there was no memory for it, say.
void RollCall::issue_given_up() {
  if (open_.num_posted == open_.record.lines.size()) return;
  const Request request = open_.roll.request_of(control_->rank());
  stand_in(request, open_.roll);
  note_issued();
  open_.given_up = describe(request);
}

// Whether all operations of the script are on their way then.
bool RollCall::issue_stand_ins() {
  issue_given_up();
  if (!open_.script) return false;
  const auto& lines = open_.script->lines;
  size_t i = open_.record.lines.size();
  for (; i < lines.size() && !lines[i].meets; ++i) {
    Request request = lines[i].request;
    request.scope = scope_;
    stand_in(request, Roll(request, control_->size()));
  }
  return i == lines.size();
}

// --- scopes --------------------------------------------------------------------------------------------------------

void RollCall::begin_scope(uint64_t scope, QueuedOperations* queue) {
  if (scope_ != 0) throw InvalidArgument("begin_scope inside a scope; end it, and wait for its end, first");
  control_->begin_scope(scope);
  scope_ = scope + 1;
  open_ = Scope();
  open_.queue = queue;
  open_.record.has_queue = queue != nullptr;
}

// Ranks that followed a script may have gone different ways since.
void RollCall::compare_ends(const Cards& cards) {
  // More could have left before the last operation: the next scopes show where.
  const bool leaves_late = open_.queue != nullptr && least_ready(cards) > most_issued(cards);
  const bool is_shorter = open_.record.lines.size() < open_.script->lines.size();
  if (leaves_late || is_shorter) {
    scripts_.forget(*open_.script);
    if (is_shorter) learn();
  } else {
    scripts_.keep(*open_.script);
  }
}

void RollCall::learn() {
  const size_t fewest = open_.queue != nullptr ? 1 : kFewestLines;
  if (open_.has_everyone && open_.record.lines.size() >= fewest) scripts_.learn(std::move(open_.record));
}

// Peers may wait for this rank's next card, and hear first that there is none. But where none exchanges cards before
// the end, theirs that are queued may have left, and wait for this rank's: those leave before it waits for anybody.
Work RollCall::end_scope(ScopeEnd end, const std::string& reason) {
  if (scope_ == 0 || end_) throw InvalidArgument("end_scope without begin_scope; call begin_scope first");
  end_ = std::make_unique<End>();
  end_->how = end;
  end_->reason = reason;
  bool waits_later = false;
  try {
    if (!clique_->has_failed()) waits_later = issue_stand_ins();
    // A rank that failed after its last collective compares, too: its peers have missed nothing.
    const bool has_all = open_.script && open_.record.lines.size() == open_.script->lines.size();
    if (open_.script && open_.given_up.empty() && (end == ScopeEnd::finished || has_all)) {
      Card mine = card_of(Request());
      mine.ends = 1;
      mine.num_ready = open_.num_ready;
      mine.num_issued = open_.num_issued;
      end_->cards = post(mine);
      end_->compares = true;
    }
  } catch (...) {
    end_->error = std::current_exception();
  }
  const auto work = std::make_shared<EndWork>(*this);
  if (!waits_later) work->finish_now();
  return Work(work);
}

// Throws what makes the end of a rank that has finished its own part another, and what ended the group.
void RollCall::finish_scope() {
  const bool has_finished = end_->how == ScopeEnd::finished;
  std::exception_ptr error = end_->error;
  try {
    if (!error && end_->compares) compare_ends(await(end_->cards, "the end"));
    if (!error && has_finished && !open_.given_up.empty()) {
      throw InvalidArgument("this step went on after an error of " + open_.given_up +
                            ", for which its peers got zeros; let errors of collectives end the step");
    }
    if (!error && has_finished && !open_.script) learn();
  } catch (...) {
    if (has_finished) error = std::current_exception();
  }
  const std::unique_ptr<End> ended = std::move(end_);
  scope_ = 0;
  open_ = Scope();
  if (!error) {
    control_->end_scope(ended->how, ended->reason).wait();
    return;
  }
  try {
    control_->end_scope(ScopeEnd::failed, words_of(error)).wait();
  } catch (const Error&) {
    std::rethrow_exception(error);  // the first; what comes next on the group throws the other
  }
  std::rethrow_exception(error);
}

void RollCall::abort(const std::string& reason) noexcept {
  if (control_) control_->abort(reason);
}

}  // namespace muster::comm::nccl
