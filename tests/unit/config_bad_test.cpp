// Every kind of bad input and the sentence that refuses it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/unit/config_file.h"

namespace moed {
namespace {

struct Bad {
  std::string yaml, sentence;  // the beginning of the sentence, or after "~" a part of it
};

const std::vector<Bad> kBad = {
    {"limits:\n  lane: 3\n", "c.yaml:2: limits.lane is not a key; did you mean limits.lanes?"},
    {"lanes: 3\n", "c.yaml:1: lanes is not a key; did you mean limits.lanes?"},
    {"limit: {lanes: 3}\n", "c.yaml:1: limit is not a key; did you mean limits?"},
    {"limits: {deadline_ms: 3}", "c.yaml:1: limits.deadline_ms is not a key; did you mean calls.deadline_ms?"},
    {"model:\n  shape:\n    topk: 3\n", "c.yaml:3: model.shape.topk is not a key; did you mean model.shape.top_k?"},
    {"limits.lanes: 3\n", "c.yaml:1: limits.lanes is not a key"},
    {"<<: {rank: 0}\n", "c.yaml:1: << is not a key"},
    {"\n\nlimits: {lanes: 65}\n", "c.yaml:3: limits.lanes = 65 is outside 1..64"},
    {"limits: {lanes: 0}", "c.yaml:1: limits.lanes = 0 is outside 1..64"},
    {"limits: {lanes: -1}", "c.yaml:1: limits.lanes = -1 is outside 1..64"},
    {"limits: {lanes: 4294967297}", "c.yaml:1: limits.lanes = 4294967297 is outside 1..64"},
    {"limits: {lanes: 1.5}", "c.yaml:1: limits.lanes = 1.5 is not a whole number in 1..64"},
    {"limits: {lanes: 12abc}", "c.yaml:1: limits.lanes = 12abc is not a whole number in 1..64"},
    {"limits: {lanes: 0x10}", "c.yaml:1: limits.lanes = 0x10 is not a whole number"},
    {"limits: {lanes: 010}", "c.yaml:1: limits.lanes = 010 is not a whole number"},
    {"limits: {lanes: +3}", "c.yaml:1: limits.lanes = +3 is not a whole number"},
    {"limits: {lanes: \"3\"}", "c.yaml:1: limits.lanes = \"3\" is not a whole number"},
    {"limits: {lanes: [3]}", "c.yaml:1: limits.lanes is a list, not a whole number in 1..64"},
    {"limits: {lanes: {a: 3}}", "c.yaml:1: limits.lanes is a map, not a whole number in 1..64"},
    {"limits: {lanes: }", "c.yaml:1: limits.lanes has no value; give it a whole number in 1..64"},
    {"limits: {slots: 65}", "c.yaml:1: limits.slots = 65 is outside 1..64"},
    {"limits: {max_tokens: 833}", "c.yaml:1: limits.max_tokens = 833 is outside 1..832"},
    {"limits: {max_call_tokens: 1048577}", "c.yaml:1: limits.max_call_tokens = 1048577 is outside 1..1048576"},
    {"limits: {arena_mb: 65537}", "c.yaml:1: limits.arena_mb = 65537 is outside 1..65536"},
    {"calls: {deadline_ms: 60001}", "c.yaml:1: calls.deadline_ms = 60001 is outside 1..60000"},
    {"calls: {first_deadline_ms: 0}", "c.yaml:1: calls.first_deadline_ms = 0 is outside 1..60000"},
    {"calls: {on_lost_rank: ignore}", "c.yaml:1: calls.on_lost_rank = ignore is not one of fail, drop"},
    {"serve: {linger_us: 1001}", "c.yaml:1: serve.linger_us = 1001 is outside 0..1000"},
    {"serve: {max_pairs: 0}", "c.yaml:1: serve.max_pairs = 0 is outside 1..1048576"},
    {"service: {spin_us: 1000001}", "c.yaml:1: service.spin_us = 1000001 is outside 0..1000000"},
    {"service: {cpu: -2}", "c.yaml:1: service.cpu = -2 is outside -1..1023"},
    {"recorder: {calls: 65537}", "c.yaml:1: recorder.calls = 65537 is outside 1..65536"},
    {"model: {seed: 18446744073709551616}",
     "c.yaml:1: model.seed = 18446744073709551616 is outside 0..18446744073709551615"},
    {"model: {seed: -1}", "c.yaml:1: model.seed = -1 is outside 0..18446744073709551615"},
    {"model: {layers: 3-2}", "c.yaml:1: model.layers = 3-2 is not all, or a range"},
    {"model: {layers: 1--2}", "c.yaml:1: model.layers = 1--2 is not all, or a range"},
    {"model: {layers: 0-1}", "c.yaml:1: model.layers = 0-1 is outside the model's 1-2"},
    {"model: {layers: 2-3}", "c.yaml:1: model.layers = 2-3 is outside the model's 1-2"},
    {"model:\n  source: huggingface\n", "c.yaml:2: model.source = huggingface needs model.path"},
    {"model:\n  path: /w\n", "c.yaml:2: model.path = \"/w\" is only for model.source huggingface, here identity"},
    {"model: {source: huggingface, path: /w,\n shape: {top_k: 4}}",
     "c.yaml:2: model.shape.top_k is not for model.source huggingface"},
    {"model:\n  shape:\n    latent: 100\n", "c.yaml:3: model.shape.latent = 100 is not a multiple of 64 up to 16384"},
    {"model: {shape: {hidden: 12}}", "c.yaml:1: model.shape.hidden = 12 is not a multiple of 8 up to 16384"},
    {"model: {shape: {intermediate: 33}}", "c.yaml:1: model.shape.intermediate = 33 is not a multiple of 32"},
    {"model: {shape: {top_k: 33}}", "c.yaml:1: model.shape.top_k = 33 is outside 1..32"},
    {"model: {shape: 5}", "c.yaml:1: model.shape = 5 is not a map; it has the keys hidden, latent"},
    {"model: {shape: [5]}", "c.yaml:1: model.shape is a list, which is not a map"},
    {"model: {shape: {experts: 1}}\ncontrol: {peers: ['localhost:1', 'localhost:2']}",
     "c.yaml:1: model.shape.experts = 1 is not at least one a rank"},
    {"model: {revision: \"12345678901234567890123456789012\"}",
     "c.yaml:1: model.revision = \"12345678901234567890123456789012\" is not up to 31"},
    {"backend: gpu", "c.yaml:1: backend = gpu is not one of cpu, cuda"},
    {"transport: tcp", "c.yaml:1: transport = tcp is not one of heap, nccl"},
    {"device: x", "c.yaml:1: device = x is not a CUDA ordinal or a GPU UUID"},
    {"group: ''", "c.yaml:1: group = \"\" is not 1 to 31 of the characters"},
    {"group: a/b", "c.yaml:1: group = a/b is not 1 to 31 of the characters"},
    {"group: ..", "c.yaml:1: group = .. is not 1 to 31 of the characters"},
    {"group: a2345678901234567890123456789012", "c.yaml:1: group = a2345678901234567890123456789012 is not 1 to 31"},
    {"run_dir: \"/x\nlimits: {lanes: 3}\n", "~not valid YAML"},
    {"run_dir: '/x\n\n\n", "~not valid YAML"},
    {"group: ~", "c.yaml:1: group has no value; give it 1 to 31"},
    {"run_dir: ''", "c.yaml:1: run_dir = \"\" is not a directory's name"},
    {"run_dir: \"a\\nb\"", "c.yaml:1: run_dir = \"a\\x0ab\" is not a directory's name"},
    {"group: abc\nrun_dir: /" + std::string(87, 'd'), "c.yaml:2: run_dir = \"/ddd"},
    {"rank: 1", "c.yaml:1: rank = 1 is outside 0..0: control.peers has 1 entry"},
    {"rank: 128", "c.yaml:1: rank = 128 is outside 0..127"},
    {"\ncontrol: {peers: ['localhost:1', 'localhost:2']}\n\nmodel: {shape: {experts: 1}}",
     "c.yaml:4: model.shape.experts = 1 is not at least one a rank"},
    {"control: {peers: []}", "c.yaml:1: control.peers has 0 entries, outside 1..128"},
    {"control: {peers: localhost:1}",
     "c.yaml:1: control.peers = localhost:1 is not a list of 1 to 128 entries host:port"},
    {"control: {peers: [localhost]}", "c.yaml:1: control.peers = \"localhost\" (rank 0) is not host:port"},
    {"control: {peers: ['localhost:1', 'localhost:0']}",
     "c.yaml:1: control.peers = \"localhost:0\" (rank 1) is not host:port"},
    {"control: {peers: ['localhost:65536']}",
     "c.yaml:1: control.peers = \"localhost:65536\" (rank 0) is not host:port"},
    {"control: {peers: ['::1:80']}", "c.yaml:1: control.peers = \"::1:80\" (rank 0) is not host:port"},
    {"control: {peers: ['a:1', 'b:1', 'a:1']}",
     "c.yaml:1: control.peers = \"a:1\" (rank 2) is also the entry of rank 0"},
    {"control: {peers: [[a]]}", "c.yaml:1: control.peers has a list as an entry"},
    {"control: {peers: [{a: b}]}", "c.yaml:1: control.peers has a map as an entry"},
    {"control: {peers: [~]}", "c.yaml:1: an empty entry is not accepted"},
    {"control:\n  peers: ['node1:1']", "c.yaml:2: control.secret_dir is empty, but control.peers has \"node1:1\""},
    {"control: {peers: ['127.example.com:1']}", "c.yaml:1: control.secret_dir is empty"},
    {"control: {listen: ':7400'}", "c.yaml:1: control.secret_dir is empty, but control.listen = \":7400\""},
    {"control: {listen: '7400'}", "c.yaml:1: control.listen = \"7400\" is not host:port, :port or empty"},
    {"control: {ucx_ports: '9-8'}", "c.yaml:1: control.ucx_ports = \"9-8\" is not a range of ports"},
    {"control: {ucx_ports: '0-8'}", "c.yaml:1: control.ucx_ports = \"0-8\" is not a range of ports"},
    {"control: {ucx_ports: '1-65536'}", "c.yaml:1: control.ucx_ports = \"1-65536\" is not a range of ports"},
    {"http: {listen: 'localhost:99999'}", "c.yaml:1: http.listen = \"localhost:99999\" is not host:port"},
    {"http: {listen: '[::g]:1'}", "c.yaml:1: http.listen = \"[::g]:1\" is not host:port"},
    {"http: {listen: \"[::\\0c1]:80\"}", "c.yaml:1: http.listen = \"[::\\x00c1]:80\" is not host:port"},
    {"heartbeat: {interval_ms: 600}",
     "c.yaml:1: heartbeat.lost_after_ms = 1000 is under twice heartbeat.interval_ms = 600"},
    {"metrics: {experts: yes}", "c.yaml:1: metrics.experts = yes is not true or false"},
    {"metrics: {experts: 1}", "c.yaml:1: metrics.experts = 1 is not true or false"},
    {"metrics: {experts: \"true\"}", "c.yaml:1: metrics.experts = \"true\" is not true or false"},
    {"log: {level: Info}", "c.yaml:1: log.level = Info is not one of debug, info, warn, error"},
    {"log:\n", "~log has no value; give it the keys level"},
    {"debug: {flip_after_ms: 5}",
     "c.yaml:1: debug.flip_after_ms = 5 is only for model.source synthetic, here identity"},
    {"model: {source: synthetic}\ndebug: {flip_after_ms: 5}",
     "c.yaml: debug.flip_layer = 0 is outside 1..2 of model.shape"},
    {"model: {source: synthetic}\ndebug: {flip_after_ms: 5, flip_layer: 2, flip_expert: 32}",
     "c.yaml:2: debug.flip_expert = 32 is outside 0..31 of model.shape"},
    {"debug: {for_ms: 99999999999}", "c.yaml:1: debug.for_ms = 99999999999 is outside 0..3600000"},
    {"rank: 0\nrank: 0\n", "c.yaml:2: rank is given twice, first at "},
    {"limits: {lanes: 1}\nlog: {level: info}\nlimits: {slots: 1}\n", "c.yaml:3: limits is given twice, first at "},
    {"limits: {lanes: 1, lanes: 2}", "c.yaml:1: limits.lanes is given twice"},
    {"rank: &a 0\n", "c.yaml:1: a YAML anchor"},
    {"limits: &a {lanes: 1}\n", "c.yaml:1: a YAML anchor"},
    {"rank: *a\n", "~"},
    {"rank: !!int 0\n", "c.yaml:1: a YAML tag"},
    {"? [a]\n: b\n", "c.yaml:1: a list as a key"},
    {"? {a: b}\n: b\n", "c.yaml:1: a map as a key"},
    {"~: b\n", "c.yaml:1: an empty entry is not accepted"},
    {"[a, b]\n", "c.yaml:1: a list is not a map of keys"},
    {"just text\n", "c.yaml:1: \"just text\" is not a map of keys"},
    {"rank: 0\n---\nrank: 0\n", "~a second YAML document is not accepted"},
    {"limits: {lanes: 1\n", "~not valid YAML"},
    {"a: b: c\n", "~"},
    {"rank: \"0\n", "~not valid YAML"},
    {"\trank: 0\n", "~"},
    {"%YAML 1.\x01\xff\n---\nrank: 0\n", "c.yaml:1: not valid YAML: bad YAML version: 1.\\x01\\xff"},
    {std::string("rank: 0\0", 8), "~NUL byte"},
};

TEST_F(ConfigFile, BadInputIsRefusedInOneSentence) {
  for (const Bad& bad : kBad) {
    const std::string what = refusal(bad.yaml);
    EXPECT_NE(what, "") << "taken: " << bad.yaml;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    const bool part = bad.sentence.starts_with('~');
    EXPECT_TRUE(part ? what.find(bad.sentence.substr(1)) != what.npos : what.starts_with(bad.sentence))
        << bad.yaml << "\nexpected " << bad.sentence << "\ngot      " << what;
  }
}

}  // namespace
}  // namespace moed
