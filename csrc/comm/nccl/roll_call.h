// The roll call of a group: how its ranks learn on the host what each of them asks for.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/nccl/card.h"
#include "comm/nccl/clique.h"
#include "comm/nccl/roll.h"
#include "comm/nccl/script.h"

namespace muster::comm::nccl {

/// One rank's side, over a control group on the host. Externally synchronised.
///
/// In a scope ranks exchange cards before an operation, which waits for the peers. Where all took part in two scopes
/// that were alike, they remember these as a script, and follow it in the next one that begins so: they exchange cards
/// before the first operation, where all must take part and have the same script; before those that the script marks
/// (barriers, gathers of any sizes, and where something queued left); and where the scope ends. Else they issue what
/// the script says, and after its last operation what is queued leaves by itself.
///
/// A rank that goes another way, asks for something else or ends the scope early, has stand-ins issued for what its
/// peers may have issued meanwhile: up to the next operation that the script marks, which nobody passes alone. So no
/// device waits for what never comes. Then it exchanges cards: either all have gone that way at the same place and
/// leave the script there, or the cards differ, at the latest at the end.
class RollCall {
 public:
  /// Issues an operation whose result nobody reads.
  using StandIn = std::function<void(const Request& request, const Roll& roll)>;

  /// `control` may be null: then there are no scopes and no exchange.
  RollCall(std::shared_ptr<Clique> clique, CommunicatorPtr control, StandIn stand_in);

  bool has_control() const noexcept { return control_ != nullptr; }
  bool is_in_scope() const noexcept { return scope_ != 0; }

  /// Who takes part in the operation that this rank issues next. In a scope the request gets its number, and
  /// note_posted() and note_issued() follow. Throws RemoteError and LayoutMismatch as Communicator says, and what ended
  /// the group.
  Roll call(Request& request, GatherSizes sizes = GatherSizes::any);
  /// The roll of cards that ranks exchanged otherwise, outside scopes. Throws LayoutMismatch where they differ.
  Roll compare(const Cards& cards);
  /// What was called is on its way to the device: no stand-in is needed.
  void note_posted() noexcept { open_.num_posted = open_.record.lines.size(); }
  /// It was issued: so is what leaves behind it.
  void note_issued() noexcept;

  void begin_scope(uint64_t scope, QueuedOperations* queue);
  /// See Communicator.
  Work end_scope(ScopeEnd end, const std::string& reason);

  void abort(const std::string& reason) noexcept;

 private:
  /// The scope that is open.
  struct Scope {
    QueuedOperations* queue = nullptr;
    Script record;                         // of what was called in it
    bool has_everyone = true;              // in all that was called
    std::shared_ptr<const Script> script;  // that all ranks follow; null once they do not
    size_t num_posted = 0;                 // of the record
    Roll roll;                             // of the last operation
    int64_t num_leaving = 0;               // how many of what is queued will have left behind it
    int64_t num_ready = 0;                 // when it was called
    int64_t num_issued = 0;                // of what is queued, behind it
    std::string given_up;                  // an operation that was called and not issued, in words
  };
  /// How it ends.
  struct End {
    ScopeEnd how = ScopeEnd::finished;
    std::string reason;
    bool compares = false;
    Work cards;  // of the ends, where it compares them
    std::exception_ptr error;
  };
  class EndWork;

  Card card_of(const Request& request) const;
  Work post(const Card& mine);
  Cards await(Work work, const std::string& what);
  void check(const Cards& cards);
  Roll call_in_scope(const Request& request, GatherSizes sizes);
  void stand_in(const Request& request, const Roll& roll);
  void issue_given_up();
  bool issue_stand_ins();
  void compare_ends(const Cards& cards);
  void learn();
  void finish_scope();

  const std::shared_ptr<Clique> clique_;
  const CommunicatorPtr control_;
  const StandIn stand_in_;
  uint64_t scope_ = 0;  // 1 + id inside a scope
  Scope open_;
  std::unique_ptr<End> end_;  // until it was waited for
  Scripts scripts_;
};

}  // namespace muster::comm::nccl
