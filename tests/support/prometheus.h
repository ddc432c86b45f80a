// A real Prometheus that scrapes what a test wants, and what can be asked of it.
#pragma once

#include <curl/curl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/ports.h"
#include "tests/support/process.h"

namespace moed::test {

inline constexpr const char* kPrometheus = "/usr/bin/prometheus";

/// A series: its labels, its name among them as __name__. Empty labels are left out: to Prometheus they do not exist.
using Series = std::map<std::string, std::string>;
using Samples = std::map<Series, double>;

/// A server of its own, with its data in a folder of its own; it ends with this object or with the test.
class Prometheus {
 public:
  explicit Prometheus(const std::vector<uint16_t>& targets) : port_(free_ports(1).front()) {
    std::ofstream config(dir_.path() + "/prometheus.yml");
    config << "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n"
           << "  - job_name: moed\n    static_configs:\n      - targets: [";
    for (const uint16_t port : targets) config << (port == targets.front() ? "" : ", ") << '"' << instance(port) << '"';
    config << "]\n";
    config.close();
    pid_ = spawn({kPrometheus, "--config.file=" + dir_.path() + "/prometheus.yml",
                  "--storage.tsdb.path=" + dir_.path() + "/data", "--web.listen-address=" + instance(port_)},
                 dir_.path() + "/log");
  }
  Prometheus(const Prometheus&) = delete;
  Prometheus& operator=(const Prometheus&) = delete;
  ~Prometheus() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  static std::string instance(uint16_t port) { return "127.0.0.1:" + std::to_string(port); }
  std::string log() const { return read_file(dir_.path() + "/log"); }

  /// The data of an answer of its HTTP API, such as api("targets"); null when there is none within 5 s or an error.
  nlohmann::json api(const std::string& path) const {
    const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(curl_easy_init(), curl_easy_cleanup);
    std::string body;
    curl_easy_setopt(curl.get(), CURLOPT_URL, ("http://" + instance(port_) + "/api/v1/" + path).c_str());
    curl_easy_setopt(curl.get(), CURLOPT_TIMEOUT_MS, 5000L);
    curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl.get(), CURLOPT_NOPROXY, "*");
    curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &body);
    curl_easy_setopt(
        curl.get(), CURLOPT_WRITEFUNCTION, +[](char* data, size_t size, size_t count, void* to) {
          static_cast<std::string*>(to)->append(data, size * count);
          return size * count;
        });
    if (curl_easy_perform(curl.get()) != CURLE_OK) return {};  // it has only just been started
    const nlohmann::json answer = nlohmann::json::parse(body, nullptr, false);
    return answer.is_object() && answer.value("status", "") == "success" ? answer["data"] : nlohmann::json();
  }

  /// The samples that an expression gives now; `job` says nothing here and is left out.
  Samples query(const std::string& expression) const {
    const std::unique_ptr<char, decltype(&curl_free)> text(curl_easy_escape(nullptr, expression.c_str(), 0), curl_free);
    Samples samples;
    const nlohmann::json data = api(std::string("query?query=") + text.get());
    if (data.is_null()) return samples;
    for (const nlohmann::json& one : data.at("result")) {
      auto series = one.at("metric").get<Series>();
      series.erase("job");
      samples[series] = std::strtod(one.at("value").at(1).get<std::string>().c_str(), nullptr);
    }
    return samples;
  }

 private:
  TempDir dir_;
  uint16_t port_;
  pid_t pid_ = 0;
};

/// The samples of a page, each with the label that a scrape of it adds.
inline Samples parse_page(const std::string& body, const std::string& instance) {
  static const std::regex label(R"re(([a-z_]+)="((?:[^"\\]|\\.)*)")re");
  Samples samples;
  std::istringstream lines(body);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    Series series{{"__name__", line.substr(0, line.find_first_of(" {"))}, {"instance", instance}};
    const size_t space = line.rfind(' ');
    const std::string labels = line.substr(0, space);
    for (std::sregex_iterator it(labels.begin(), labels.end(), label), end; it != end; ++it) {
      std::string value;
      const std::string escaped = (*it)[2];
      for (size_t i = 0; i < escaped.size(); ++i)
        value += escaped[i] != '\\' ? escaped[i] : escaped[++i] == 'n' ? '\n' : escaped[i];
      if (!value.empty()) series[(*it)[1]] = value;
    }
    EXPECT_TRUE(samples.emplace(series, std::strtod(line.c_str() + space, nullptr)).second) << "twice: " << line;
  }
  return samples;
}

}  // namespace moed::test
