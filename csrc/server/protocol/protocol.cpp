#include "server/protocol/protocol.h"

namespace muster::server {

namespace {

Refusal refusal(Refusal::Kind kind, const std::exception& error) {
  return {kind, std::string(error.what()).substr(0, kMaxText)};
}

}  // namespace

Refusal describe(const std::exception_ptr& error) {
  using Kind = Refusal::Kind;
  try {
    std::rethrow_exception(error);
  } catch (const Fenced& fenced) {
    return refusal(Kind::fenced, fenced);
  } catch (const Occupied& occupied) {
    return refusal(Kind::occupied, occupied);
  } catch (const LayoutMismatch& mismatch) {
    return refusal(Kind::layout_mismatch, mismatch);
  } catch (const InvalidArgument& invalid) {
    return refusal(Kind::invalid_argument, invalid);
  } catch (const Timeout& timeout) {
    return refusal(Kind::timeout, timeout);
  } catch (const CheckpointError& checkpoint) {
    return refusal(Kind::checkpoint, checkpoint);
  } catch (const PeerLost& lost) {
    return refusal(lost.rank() == kChief ? Kind::chief_lost : Kind::other, lost);
  } catch (const std::exception& other) {
    return refusal(Kind::other, other);
  }
}

void raise(const Refusal& refusal) {
  switch (refusal.kind) {
    case Refusal::Kind::invalid_argument:
      throw InvalidArgument(refusal.text);
    case Refusal::Kind::layout_mismatch:
      throw LayoutMismatch(refusal.text);
    case Refusal::Kind::timeout:
      throw Timeout(refusal.text);
    case Refusal::Kind::fenced:
      throw Fenced(refusal.text);
    case Refusal::Kind::checkpoint:
      throw CheckpointError(refusal.text);
    case Refusal::Kind::chief_lost:
      throw PeerLost(kChief, refusal.text);
    case Refusal::Kind::occupied:
      throw Occupied(refusal.text);
    default:
      throw CommError(refusal.text);
  }
}

}  // namespace muster::server
