// Builds the JSON of report.h. The only file of the daemon proper that includes nlohmann-json.
#include "daemon/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "daemon/abi/attach.h"

namespace moed {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxText = 256;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

/// Cut, ended at the first zero byte, and without control characters (C0, DEL, C1), which a terminal would obey.
std::string clean(std::string_view text) {
  text = text.substr(0, std::min(text.find('\0'), kMaxText));
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const unsigned next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    const bool c1 = byte == 0xC2 && next >= 0x80 && next <= 0x9F;
    if (byte < 0x20 || byte == 0x7F || c1)
      out += kReplacement;
    else
      out += text[i];
    if (c1) ++i;
  }
  return out;
}

/// `value` with so many decimals, so that it prints short.
double decimals(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

std::string print(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json lanes_json(const Report& r) {
  Json lanes = Json::array();
  for (const Report::Lane& l : r.lanes)
    lanes.push_back({{"lane", l.lane}, {"name", clean(l.name)}, {"pid", l.pid}, {"calls", l.calls}, {"dry", l.dry}});
  return lanes;
}

Json peers_json(const Report& r) {
  Json peers = Json::array();
  for (const Report::Peer& p : r.peers) {
    Json heartbeat;
    if (p.heartbeat_ms) heartbeat = decimals(*p.heartbeat_ms, 1);
    peers.push_back({{"rank", p.rank},
                     {"link", clean(p.link)},
                     {"heartbeat_ms", heartbeat},
                     {"wait_s", decimals(p.wait_s, 6)},
                     {"wait_by",
                      {{"queue", decimals(p.wait_by[0], 6)},
                       {"experts", decimals(p.wait_by[1], 6)},
                       {"send", decimals(p.wait_by[2], 6)},
                       {"wire", decimals(p.wait_by[3], 6)}}},
                     {"last", p.last},
                     {"losses", p.losses},
                     {"busy", clean(p.busy)},
                     {"loop_ms", decimals(p.loop_ms, 3)},
                     {"waits_for", p.waits_for ? Json(*p.waits_for) : Json()},
                     {"waits_ms", decimals(p.waits_ms, 3)}});
  }
  return peers;
}

Json phases_json(const Report& r) {
  Json phases = Json::object();
  for (const Report::Phase& p : r.phases)
    phases[p.name] = {{"p50", decimals(p.p50_us, 1)}, {"p99", decimals(p.p99_us, 1)}};
  return phases;
}

Json calls_json(const Report& r) {
  Json calls = {{name(Status::ok), r.calls[0]}};
  for (uint32_t s = 1; s < kStatuses; ++s)
    if (r.calls[s] > 0) calls[name(static_cast<Status>(s))] = r.calls[s];
  return calls;
}

Json texts(const std::vector<std::string>& lines) {
  Json out = Json::array();
  for (const std::string& line : lines) out.push_back(clean(line));
  return out;
}

std::string hex(uint64_t value) {
  std::string out(16, '0');
  for (auto digit = out.rbegin(); digit != out.rend(); ++digit, value >>= 4U) *digit = "0123456789abcdef"[value & 15U];
  return out;
}

/// Halves the longest of the lists until the text fits.
std::string fit(Json& json) {
  std::string text = print(json);
  while (text.size() > kMaxStatusBytes) {
    const char* longest = "missing";
    for (const char* key : {"lanes", "peers"})
      if (json[key].size() > json[longest].size()) longest = key;
    Json& list = json[longest];
    if (list.empty()) break;
    const auto keep = static_cast<Json::difference_type>(list.size() / 2);
    list.erase(list.begin() + keep, list.end());
    json["truncated"] = true;
    text = print(json);
  }
  return text;
}

}  // namespace

std::string to_json(const Report& r) {
  Json json = {{"rank", r.rank},
               {"ranks", r.ranks},
               {"ready", r.ready},
               {"missing", texts(r.missing)},
               {"backend", clean(r.backend)},
               {"transport", clean(r.transport)},
               {"sharing", clean(r.sharing)},
               {"incarnation", hex(r.incarnation)},
               {"uptime_s", decimals(r.uptime_s, 1)},
               {"version", clean(r.version)},
               {"socket", clean(r.socket)},
               {"http", clean(r.http)},
               {"limits", {{"lanes", r.lanes_max}}},
               {"lanes", lanes_json(r)},
               {"calls", calls_json(r)},
               {"call_us", {{"p50", decimals(r.p50_us, 1)}, {"p99", decimals(r.p99_us, 1)}}},
               {"phase_us", phases_json(r)},
               {"peers", peers_json(r)},
               {"memory", {{"heap", r.heap}, {"weights", r.weights}}}};
  return fit(json);
}

std::string waits_json(uint32_t rank, const std::vector<WaitsRow>& rows) {
  Json json = {{"rank", rank}, {"ranks", rows.size()}, {"rows", Json::array()}};
  for (const WaitsRow& row : rows) {
    Json waits = Json::array();
    for (const double ms : row.wait_ms) waits.push_back(decimals(ms, 6));
    json["rows"].push_back({{"rank", json["rows"].size()},
                            {"age_ms", row.age_ms ? Json(decimals(*row.age_ms, 1)) : Json()},
                            {"wait_ms", std::move(waits)}});
  }
  return print(json);
}

std::string health_json(bool ok, const std::vector<std::string>& missing) {
  return print({{"ok", ok}, {"missing", texts(missing)}});
}

const char* link_name(uint32_t state) {
  constexpr const char* names[] = {"connecting", "mapped", "ready", "lost"};
  return state < 4 ? names[state] : "unknown";
}

}  // namespace moed
