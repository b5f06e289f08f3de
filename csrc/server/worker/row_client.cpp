#include "server/worker/row_client.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::server {

namespace {

// One of the arrays that follow one another in a payload.
struct RowArray {
  const void* data;
  size_t row_bytes;  // of it
};

// Copies rows, where they lie in the arrays, into a payload.
void gather(std::span<const size_t> places, std::span<const RowArray> arrays, std::byte* to) {
  for (const auto& array : arrays) {
    const auto* const from = static_cast<const std::byte*>(array.data);
    if (array.row_bytes == 0 || places.empty()) continue;
    for (const size_t place : places) {
      std::memcpy(to, from + place * array.row_bytes, array.row_bytes);
      to += array.row_bytes;
    }
  }
}

size_t parts_of(size_t rows, size_t row_bytes) {
  const size_t most = rows_a_part(row_bytes);
  return (rows + most - 1) / most;
}

// Of as many parts, all about as large.
std::span<const size_t> part_of(const std::vector<size_t>& places, size_t part, size_t parts) {
  const size_t first = places.size() * part / parts;
  return std::span(places).subspan(first, places.size() * (part + 1) / parts - first);
}

// As many as keep all lanes at work, of some size.
size_t parts_for_lanes(size_t rows, size_t row_bytes, size_t lanes) {
  constexpr size_t kWorthALane = size_t{256} << 10;
  return std::max(parts_of(rows, row_bytes), std::min(lanes, rows * row_bytes / kWorthALane));
}

// The rows of an answer, each of so many bytes in all.
size_t rows_in(const net::Frame& answer, size_t row_bytes) {
  if (answer.payload.size() % row_bytes != 0) throw CommError("a server sent rows of another size");
  return answer.payload.size() / row_bytes;
}

// Takes the next array of an answer's payload, behind what `to` has up to `first`.
template <class T>
void take(Bytes& payload, size_t count, size_t first, std::vector<T>& to) {
  to.resize(first + count);
  const size_t bytes = count * sizeof(T);
  if (bytes > 0) std::memcpy(to.data() + first, payload.data(), bytes);
  payload = payload.subspan(bytes);
}

void check_sizes(const TableSpec& table, size_t rows, size_t values, size_t states, int64_t state_width) {
  const bool is_valid =
      values == rows * static_cast<size_t>(table.dim) && states == rows * static_cast<size_t>(state_width);
  if (is_valid) return;
  throw InvalidArgument(std::to_string(rows) + " rows of table '" + table.name + "' came with " +
                        std::to_string(values) + " values and " + std::to_string(states) +
                        " of state; give all of each row");
}

TableRows in_order(TableRows found, size_t dim, size_t width) {
  std::vector<size_t> places(found.rows.size());
  std::iota(places.begin(), places.end(), 0);
  std::sort(places.begin(), places.end(), [&](size_t a, size_t b) { return found.rows[a] < found.rows[b]; });
  TableRows sorted{found.rows, found.values, found.states, found.steps};
  for (size_t i = 0; i < places.size(); ++i) {
    sorted.rows[i] = found.rows[places[i]];
    std::copy_n(found.values.data() + places[i] * dim, dim, sorted.values.data() + i * dim);
    std::copy_n(found.states.data() + places[i] * width, width, sorted.states.data() + i * width);
  }
  return sorted;
}

}  // namespace

RowClient::RowClient(const ClientConfig& config, ClientMemory& memory, Replay& replay, Requests& requests)
    : config_(config), memory_(memory), replay_(replay), requests_(requests) {
  for (const auto& table : config_.plan.tables) {
    state_widths_.push_back(empty_table(table, config_.plan.groups).state_width());
  }
}

const TableSpec& RowClient::table(uint32_t index) const {
  if (index < config_.plan.tables.size()) return config_.plan.tables[index];
  throw InvalidArgument("there is no table " + std::to_string(index) + "; the plan has " +
                        std::to_string(config_.plan.tables.size()));
}

std::vector<std::vector<size_t>> RowClient::divide(const TableSpec& table, std::span<const int64_t> rows) const {
  const auto sharding = sharding_of(table, config_.plan);
  const auto stripes = stripes_of(table, config_.plan);
  std::vector<uint32_t> stripe_of(rows.size());  // over all servers
  std::vector<size_t> next(requests_.num_servers() * stripes.count());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= table.num_rows) {
      throw InvalidArgument("row " + std::to_string(rows[i]) + " is not in [0, " + std::to_string(table.num_rows) +
                            "): table '" + table.name + "' has so many rows");
    }
    stripe_of[i] = static_cast<uint32_t>(sharding.server_of(rows[i])) * stripes.count() + stripes.of(rows[i]);
    ++next[stripe_of[i]];
  }
  std::vector<std::vector<size_t>> places;
  for (size_t s = 0; s < next.size(); s += stripes.count()) {
    size_t count = 0;
    for (size_t i = s; i < s + stripes.count(); ++i) count += std::exchange(next[i], count);
    places.emplace_back(count);
  }
  for (size_t i = 0; i < rows.size(); ++i) places[stripe_of[i] / stripes.count()][next[stripe_of[i]]++] = i;
  return places;
}

void RowClient::write(uint32_t index, std::span<const int64_t> rows, std::span<const float> values,
                      std::span<const float> states) {
  const auto& spec = table(index);
  check_sizes(spec, rows.size(), values.size(), states.size(), state_width(index));
  const RowArray arrays[] = {{rows.data(), sizeof(int64_t)},
                             {values.data(), static_cast<size_t>(spec.dim) * sizeof(float)},
                             {states.data(), static_cast<size_t>(state_width(index)) * sizeof(float)}};
  const size_t row_bytes = arrays[0].row_bytes + arrays[1].row_bytes + arrays[2].row_bytes;
  const auto places = divide(spec, rows);
  std::vector<std::byte> payload;
  for (size_t s = 0; s < requests_.num_servers(); ++s) {
    const size_t parts = parts_of(places[s].size(), row_bytes);
    for (size_t part = 0; part < parts; ++part) {
      const auto of_part = part_of(places[s], part, parts);
      payload.resize(of_part.size() * row_bytes);
      gather(of_part, arrays, payload.data());
      const Bytes bytes(payload);
      requests_.retried(s, [&] {
        requests_.link(s).send(WriteRows{index}, {&bytes, 1});
        return requests_.link(s).receive<Done>(requests_.between());
      });
    }
  }
}

void RowClient::write_steps(uint32_t index, uint64_t steps) {
  table(index);
  requests_.call_all<Done>(WriteRowSteps{index, steps});
}

void RowClient::push(uint64_t step, uint32_t index, std::span<const int64_t> rows, std::span<const float> gradients) {
  const auto& spec = table(index);
  check_sizes(spec, rows.size(), gradients.size(), 0, 0);
  if (std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) != rows.end()) {
    throw InvalidArgument("rows of a push must ascend, each coming once; sum the gradients of each row first");
  }
  const auto places = divide(spec, rows);
  auto& entry = requests_.entry_of(step);
  const auto is_same = [&](const PushLog::Rows& known) { return known.table == index; };
  if (std::any_of(entry.rows.begin(), entry.rows.end(), is_same)) {
    throw InvalidArgument("table '" + spec.name + "' is pushed twice in step " + std::to_string(step) +
                          "; sum the gradients of each row first");
  }
  const RowArray arrays[] = {{rows.data(), sizeof(int64_t)},
                             {gradients.data(), static_cast<size_t>(spec.dim) * sizeof(float)}};
  const size_t row_bytes = arrays[0].row_bytes + arrays[1].row_bytes;
  // Servers of synchronous jobs make room between steps alone: a step that has begun is finished.
  const bool beyond_bound = config_.plan.is_synchronous();
  std::vector<PushLog::Rows> parts;
  for (uint32_t s = 0; s < requests_.num_servers(); ++s) {
    const auto count = static_cast<uint32_t>(std::max<size_t>(parts_of(places[s].size(), row_bytes), 1));
    for (uint32_t part = 0; part < count; ++part) {
      const auto of_part = part_of(places[s], part, count);
      const size_t bytes = of_part.size() * row_bytes;
      std::byte* const place =
          bytes == 0 ? nullptr : requests_.wait_for_log([&] { return replay_.log().room(entry, bytes, beyond_bound); });
      gather(of_part, arrays, place);
      parts.push_back({index, s, part, count, {place, bytes}});
    }
  }
  entry.rows.insert(entry.rows.end(), parts.begin(), parts.end());
  for (const auto& part : parts) {
    try {
      auto& link = requests_.link(part.server);
      if (!link.is_broken()) Replay::send_rows(link, step, part, requests_.between());
    } catch (const LinkBroken&) {
      continue;  // it is left to the next call that waits
    }
  }
}

// A server's requests end within the plan's timeout.
std::byte* RowClient::landing_of(size_t server, uint32_t lane) {
  constexpr uint64_t kBytes = uint64_t{5} << 20;  // rows and values of a part, of the longest row
  static_assert(kBytes >= (uint64_t{2} << 20) + kMaxRowDim * sizeof(float) + kPayloadAlignment);
  landings_.resize(requests_.num_servers() * config_.lanes);
  auto& landing = landings_[server * config_.lanes + lane];
  const uint64_t connects = requests_.link(server).connects();
  if (landing.memory != nullptr && landing.connects == connects) return landing.memory;
  if (landing.memory != nullptr)
    resting_.emplace_back(requests_.limit() + std::chrono::milliseconds(config_.plan.timeout_ms), landing.memory);
  if (!resting_.empty() && resting_.front().first < config_.surroundings->now()) {
    landing.memory = resting_.front().second;
    resting_.pop_front();
  } else {
    landing.memory = memory_.allocate(kBytes);
  }
  landing.connects = connects;
  return landing.memory;
}

void RowClient::pull(uint32_t index, uint64_t at_least, std::span<const int64_t> rows, std::span<float> values) {
  const auto& spec = table(index);
  check_sizes(spec, rows.size(), values.size(), 0, 0);
  const auto dim = static_cast<size_t>(spec.dim);
  const size_t row_bytes = sizeof(int64_t) + dim * sizeof(float);
  const auto places = divide(spec, rows);
  std::vector<size_t> counts;
  for (const auto& of_server : places) {
    counts.push_back(parts_for_lanes(of_server.size(), row_bytes, config_.lanes));
  }
  requests_.ask_all(counts, [&](size_t s, size_t part) {
    auto& link = requests_.link(s);
    const auto lane = static_cast<uint32_t>(part % config_.lanes);
    link.drain_lane(lane, requests_.between());
    const auto of_part = part_of(places[s], part, counts[s]);
    std::byte* const numbers = landing_of(s, lane);
    const RowArray array{rows.data(), sizeof(int64_t)};
    gather(of_part, {&array, 1}, numbers);
    const Bytes payload(numbers, of_part.size() * sizeof(int64_t));
    const std::span<std::byte> place(
        numbers + (payload.size() + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment,
        of_part.size() * dim * sizeof(float));
    const auto shared = memory_.place_of(place);
    link.send_chunk(
        lane, PullRows::kType, encode(PullRows{index, at_least, shared.has_value(), shared.value_or(0)}), {&payload, 1},
        place,
        [of_part, place, dim, values](const net::Frame& answer) {
          Link::expect<Values>(answer);
          if (answer.payload.size() != place.size()) throw CommError("a server sent values of another size");
          const std::byte* from = answer.payload.data();
          for (const size_t row : of_part) {
            std::memcpy(values.data() + row * dim, from, dim * sizeof(float));
            from += dim * sizeof(float);
          }
        },
        requests_.between());
  });
}

TableRows RowClient::fetch(uint32_t index, uint64_t at_least) {
  const auto& spec = table(index);
  const auto dim = static_cast<size_t>(spec.dim);
  const auto width = static_cast<size_t>(state_width(index));
  const size_t row_bytes = sizeof(int64_t) + (dim + width) * sizeof(float);
  TableRows found;
  found.steps = std::numeric_limits<uint64_t>::max();
  const uint32_t stripes = stripes_of(spec, config_.plan).count();
  for (size_t i = 0; i < requests_.num_servers() * stripes; ++i) {
    const size_t s = i / stripes;
    const size_t begin = found.rows.size();
    uint64_t total = 1;
    uint64_t steps = 0;
    while (found.rows.size() - begin < total) {
      const size_t have = found.rows.size();
      std::vector<size_t> counts(requests_.num_servers());
      counts[s] = 1;
      requests_.ask_all(counts, [&](size_t, size_t) {
        const FetchRows request{index, static_cast<uint32_t>(i % stripes), at_least, have - begin};
        const auto keep = [&, have](const net::Frame& answer) {
          const auto fetched = Link::expect<FetchedRows>(answer);
          const size_t count = rows_in(answer, row_bytes);
          total = fetched.total;
          steps = fetched.steps;
          if (count == 0 && have - begin < total) throw CommError("a server keeps back rows that it has");
          Bytes payload = answer.payload;
          take(payload, count, have, found.rows);
          take(payload, count * dim, have * dim, found.values);
          take(payload, count * width, have * width, found.states);
        };
        requests_.link(s).send_chunk(0, FetchRows::kType, encode(request), {}, {}, keep, requests_.between());
      });
    }
    found.steps = std::min(found.steps, steps);
  }
  return in_order(std::move(found), dim, width);
}

}  // namespace muster::server
