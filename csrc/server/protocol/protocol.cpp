#include "server/protocol/protocol.h"

namespace muster::server {

namespace {

Failure failure(Failure::Kind kind, const std::exception& error) {
  return {kind, std::string(error.what()).substr(0, kMaxText)};
}

}  // namespace

Failure describe(const std::exception_ptr& error) {
  using Kind = Failure::Kind;
  try {
    std::rethrow_exception(error);
  } catch (const Fenced& fenced) {
    return failure(Kind::fenced, fenced);
  } catch (const LayoutMismatch& mismatch) {
    return failure(Kind::layout_mismatch, mismatch);
  } catch (const InvalidArgument& invalid) {
    return failure(Kind::invalid_argument, invalid);
  } catch (const Timeout& timeout) {
    return failure(Kind::timeout, timeout);
  } catch (const CheckpointError& checkpoint) {
    return failure(Kind::checkpoint, checkpoint);
  } catch (const PeerLost& lost) {
    return failure(lost.rank() == kChief ? Kind::chief_lost : Kind::other, lost);
  } catch (const std::exception& other) {
    return failure(Kind::other, other);
  }
}

void raise(const Failure& failure) {
  switch (failure.kind) {
    case Failure::Kind::invalid_argument:
      throw InvalidArgument(failure.text);
    case Failure::Kind::layout_mismatch:
      throw LayoutMismatch(failure.text);
    case Failure::Kind::timeout:
      throw Timeout(failure.text);
    case Failure::Kind::fenced:
      throw Fenced(failure.text);
    case Failure::Kind::checkpoint:
      throw CheckpointError(failure.text);
    case Failure::Kind::chief_lost:
      throw PeerLost(kChief, failure.text);
    default:
      throw CommError(failure.text);
  }
}

}  // namespace muster::server
