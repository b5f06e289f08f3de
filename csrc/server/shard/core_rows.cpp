// What a server answers about rows of tables.
#include <cstdint>
#include <cstring>

#include "server/shard/server_core.h"

namespace muster::server {

namespace {

// Numbers of rows and what each has, array by array. The numbers are copied: a peer can change what it shares.
struct RowPayload {
  RowPayload(Bytes payload, size_t bytes_a_row) {
    const size_t row_bytes = sizeof(int64_t) + bytes_a_row;
    if (payload.size() % row_bytes != 0 || reinterpret_cast<uintptr_t>(payload.data()) % alignof(int64_t) != 0) {
      throw InvalidArgument("rows came with " + std::to_string(payload.size()) + " bytes, no multiple of " +
                            std::to_string(row_bytes) + "; run one version of Muster on all workers and servers");
    }
    rows.resize(payload.size() / row_bytes);
    if (!rows.empty()) std::memcpy(rows.data(), payload.data(), rows.size() * sizeof(int64_t));
    rest = payload.subspan(rows.size() * sizeof(int64_t));
  }

  std::vector<int64_t> rows;
  Bytes rest;
};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

bool ServerCore::answer_rows(Session& session, Shard& shard, net::Frame& frame, Time deadline) {
  auto& tables = shard.tables();
  switch (frame.type) {
    case PushRows::kType:
      hold_rows(session, shard, decode<PushRows>(frame.message), frame);
      return true;
    case PullRows::kType:
      pull_rows(session, tables, decode<PullRows>(frame.message), frame.payload, deadline);
      return true;
    case WriteRows::kType: {
      const auto request = decode<WriteRows>(frame.message);
      const auto written = begin_writing(session);
      const size_t value_bytes = written->tables().value_bytes(request.table);
      const RowPayload payload(frame.payload, value_bytes + written->tables().state_bytes(request.table));
      const size_t values = payload.rows.size() * value_bytes;
      written->tables().write(request.table, payload.rows, payload.rest.first(values), payload.rest.subspan(values));
      reply(session, Done{});
      return true;
    }
    case WriteRowSteps::kType: {
      const auto request = decode<WriteRowSteps>(frame.message);
      check_step(request.steps);
      begin_writing(session)->tables().write_steps(request.table, request.steps);
      reply(session, Done{});
      return true;
    }
    case FetchRows::kType: {
      const auto request = decode<FetchRows>(frame.message);
      const size_t row_bytes = sizeof(int64_t) + tables.value_bytes(request.table) + tables.state_bytes(request.table);
      const auto rows = tables.fetch(request, rows_a_part(row_bytes), deadline);
      const Bytes payload[] = {bytes_of(rows.rows), bytes_of(rows.values), bytes_of(rows.states)};
      reply(session, FetchedRows{rows.total, rows.counted}, payload);
      return true;
    }
    default:
      return false;
  }
}

void ServerCore::hold_rows(Session& session, Shard& shard, const PushRows& request, net::Frame& frame) {
  check_step(request.step);
  const RowPayload payload(frame.payload, shard.tables().value_bytes(request.table));
  const bool is_fresh =
      shard.tables().hold(session.rank, session.incarnation, request, payload.rows, payload.rest, frame.owner);
  const auto pushers = note_push(shard, request.step, is_fresh);
  reply(session, Pushed{request.step, request.table, is_fresh});
  if (!pushers.empty()) shard.tables().sum_early(request.table, request.step, pushers);
}

void ServerCore::pull_rows(Session& session, TableShard& tables, const PullRows& request, net::Bytes payload,
                           Time deadline) {
  const RowPayload wanted(payload, 0);
  const size_t bytes = wanted.rows.size() * tables.value_bytes(request.table);
  if (bytes > net::FrameHeader::kMaxPayloadBytes) {
    throw InvalidArgument(std::to_string(bytes) + " bytes of rows were asked for at once; ask for fewer rows");
  }
  std::byte* const to = place_for(session, request.shares, request.place, bytes);
  if (reinterpret_cast<uintptr_t>(to) % alignof(float) != 0) {
    throw InvalidArgument("values were asked to go to memory that is not aligned");
  }
  const std::span values(reinterpret_cast<float*>(to), bytes / sizeof(float));
  const uint64_t steps = tables.pull(request.table, request.at_least, wanted.rows, values, deadline);
  const net::Bytes answer(to, bytes);
  reply(session, Values{request.table, steps}, {&answer, 1});
}

}  // namespace muster::server
