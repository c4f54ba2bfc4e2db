//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/reftest"
)

// asRank runs the command as one of the ranks, and writes what it has written.
func asRank(t *testing.T, args ...string) {
	t.Helper()
	system.Emulate(t)
	var stdout, stderr bytes.Buffer
	status := run(context.Background(), args, strings.NewReader(""), &stdout, &stderr)
	rankstest.Write(t, fmt.Sprintf("%d\n%s\n%s", status, stdout.String(), stderr.String()))
}

// bothFlags is the flags of rank 0 and those of rank 1.
const bothFlags = "OPT_TEST_BOTH_FLAGS"

// asOneOfTwo is asRank with the flags that bothFlags has for the rank.
func asOneOfTwo(t *testing.T) {
	flags, one, _ := strings.Cut(os.Getenv(bothFlags), "||")
	if os.Getenv("RANK") == "1" {
		flags = one
	}
	asRank(t, append(strings.Split(flags, "|"), "-device", "gpu")...)
}

// Two ranks write what one process does, by rank 0 alone.
func TestRanks(t *testing.T) {
	const flags, device = "OPT_TEST_FLAGS", "OPT_TEST_DEVICE"
	if rankstest.Child() {
		asRank(t, append(strings.Split(os.Getenv(flags), "|"), "-device", os.Getenv(device))...)
		return
	}
	cases := []string{"-prompt|Once upon a time|-prompt|The|-n|2"}
	if reftest.Every(t) {
		file := filepath.Join(t.TempDir(), "text")
		if err := os.WriteFile(file, []byte("Once upon a time there was a little girl."), 0o600); err != nil {
			t.Fatal(err)
		}
		cases = append(cases,
			"-prompt|Once upon a time|-n|6|-draft|ngram|-stats",
			"-prompt|Once upon a time|-n|4|-weights|f16|-cache|bf16|-temperature|1|-seed|5|-n-samples|2",
			"-perplexity|"+file,
			"-prompt|The cat|-n|4|-temperature|0.8|-seed|7|-draft|ngram|-draft-tokens|2")
	}
	for i, c := range cases {
		devices := []string{"gpu"}
		if last := len(cases) - 1; last > 0 && (i == 0 || i == last) { // two GPUs each as well
			devices = append(devices, "gpu:0,1")
		}
		env := []string{flags + "=" + c, device + "=gpu"}
		one := rankstest.Run(t, 1, env)
		for _, named := range devices {
			env[1] = device + "=" + named
			two := rankstest.Run(t, 2, env)
			for _, r := range append(one, two...) {
				if r.Err != nil || !strings.HasPrefix(r.Text, "0\n") {
					t.Fatalf("%s: %v: %s\n%s", c, r.Err, r.Text, r.Output)
				}
			}
			text := func(r rankstest.Rank) string { return strings.SplitN(r.Text, "loading", 2)[0] }
			if !sameText(text(one[0]), text(two[0])) || len(text(one[0])) < 5 {
				t.Errorf("%s: one process writes %q, two with %s each %q", c, text(one[0]), named, text(two[0]))
			}
			const exchange = "exchange 10 sums of 1.0 KB a run of decode, which take "
			if stats := strings.Contains(c, "-stats"); strings.Contains(one[0].Text, "exchange") || strings.Contains(two[0].Text, exchange) != stats {
				t.Errorf("%s: one process writes %q, two with %s each %q", c, one[0].Text, named, two[0].Text)
			}
			where := map[string]string{"gpu": "rank 0 of 2 on GPU 0 (Fake 0)\n", "gpu:0,1": "rank 0 of 2 on GPU 0 (Fake 0) with GPU 1 (Fake 1)\n"}[named]
			if !strings.Contains(two[0].Text, where) || two[1].Text != "0\n\n" {
				t.Errorf("%s: rank 0 writes %q, rank 1 %q", c, two[0].Text, two[1].Text)
			}
		}
	}
}

// Ranks that do not belong together end at once, with an exit status that is not 0, and both say what differs. Nothing is written.
func TestRanksDiffer(t *testing.T) {
	if rankstest.Child() {
		asOneOfTwo(t)
		return
	}
	t.Parallel()
	dir := writeModel(t, nil)
	with := func(dir string) string { return "-model|" + dir + "|-prompt|abc|-n|2" }
	base := with(dir)
	type ranksCase struct{ name, zero, one, ones, zeros string } // what each has
	cases := []ranksCase{
		{"prompts", "-prompt|a little girl", "-prompt|a little lion", `"prompt 1: a little lion"`, `"prompt 1: a little girl"`},
		{"-n, -seed and -weights", base + "|-seed|6", strings.Replace(base, "|-n|2", "|-n|4|-weights|f16", 1) + "|-seed|7", `"-n 4", "-seed 7", "-weights f16"`, `"-n 2", "-seed 6", "-weights stored"`},
		{"a byte of a weight", base, with(copyModel(t, dir, "model.safetensors", flipped(0.5))), `"weight `, `"weight `},
	}
	if reftest.Every(t) {
		cases = append(cases,
			ranksCase{"a longer prompt", "-prompt|Once", "-prompt|Once upon a time", `"prompt 1: Once upon a time"`, `"prompt 1: Once"`},
			ranksCase{"-temperature", base + "|-temperature|0.8|-seed|1", base + "|-temperature|0.9|-seed|1", `"-temperature 0.9"`, `"-temperature 0.8"`},
			ranksCase{"-stop", base + "|-stop|a", base + "|-stop|\x1b[31m", `"-stop [\"\\x1b[31m\"]"`, `"-stop [\"a\"]"`},
			ranksCase{"configuration", base, with(copyModel(t, dir, "config.json", replaced(`{`, `{"activation_function":"gelu",`))), `"model's Activation: gelu"`, `"model's Activation: relu"`},
			ranksCase{"tokenizer", base, with(copyModel(t, dir, "vocab.json", replaced(`"a":`, `"a" :`))), `"tokenizer: `, `"tokenizer: `})
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			const limit = 10 * time.Minute
			want := fmt.Sprintf("rank 1: it has %s", c.ones)
			for rank, r := range rankstest.Run(t, 2, []string{bothFlags + "=" + c.zero + "||" + c.one, "LEANATTENTION_RANKS_TIMEOUT=" + limit.String()}) {
				if r.Err != nil || !strings.HasPrefix(r.Text, "1\n\n") || !strings.Contains(r.Text, want) || !strings.Contains(r.Text, "and rank 0 has "+c.zeros) {
					t.Errorf("rank %d: %v: %q, want %s and %s\n%s", rank, r.Err, r.Text, want, c.zeros, r.Output)
				}
			}
		})
	}
}

// What tells of the text, or where it comes from, may differ: rank 0 alone has -stats, and each rank has files of its own.
func TestRanksMayDiffer(t *testing.T) {
	if rankstest.Child() {
		asOneOfTwo(t)
		return
	}
	t.Parallel()
	dir := writeModel(t, func(config map[string]any) { config["hidden_size"], config["num_attention_heads"] = 128, 2 })
	file := filepath.Join(t.TempDir(), "prompts")
	if err := os.WriteFile(file, []byte("abc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	zero := "-model|" + dir + "|-prompt|abc|-n|2|-stats"
	one := "-model|" + copyModel(t, dir, "", nil) + "|-prompts|" + file + "|-n|2|-json"
	all := rankstest.Run(t, 2, []string{bothFlags + "=" + zero + "||" + one, "LEANATTENTION_SECRET=0123456789abcdef", "LEANATTENTION_JOB=a job"})
	for rank, r := range all {
		if r.Err != nil || !strings.HasPrefix(r.Text, "0\n") {
			t.Errorf("rank %d: %v: %q\n%s", rank, r.Err, r.Text, r.Output)
		}
	}
	if !strings.Contains(all[0].Text, "exchange ") || all[1].Text != "0\n\n" {
		t.Errorf("%q", all)
	}
}

// sameText says whether two outputs are the same, a perplexity up to rounding.
func sameText(a, b string) bool {
	var x, y float64
	if _, err := fmt.Sscanf(a, "0\nperplexity %g", &x); err != nil {
		return a == b
	}
	_, err := fmt.Sscanf(b, "0\nperplexity %g", &y)
	return err == nil && math.Abs(x-y) < 1e-5*x
}

// What ranks can't do is refused by name, and so is what the environment has wrong.
func TestRanksRefused(t *testing.T) {
	prompt := []string{"-prompt", "Once"}
	for _, c := range []struct {
		args []string
		env  string
		want string
	}{
		{prompt, "", "-device cpu with WORLD_SIZE 2"},
		{[]string{"-device", "gpu", "-i"}, "", "-i with WORLD_SIZE 2"},
		{append(prompt, "-device", "gpu", "-prompt-cache", "x"), "", "-prompt-cache with WORLD_SIZE 2"},
		{append(prompt, "-device", "gpu", "-temperature", "1"), "", "-seed is needed"},
		{[]string{"-device", "gpu", "-prompt", "-"}, "", "standard input with WORLD_SIZE 2"},
		{[]string{"-device", "gpu", "-perplexity", "-"}, "", "standard input with WORLD_SIZE 2"},
		{append(prompt, "-device", "gpu"), "RANK=2", `RANK is "2", want a number from 0 to 1`},
		{append(prompt, "-device", "gpu"), "MASTER_PORT=", `MASTER_PORT is ""`},
	} {
		t.Run(c.want, func(t *testing.T) {
			for _, e := range []string{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1", c.env} {
				if name, value, ok := strings.Cut(e, "="); ok {
					t.Setenv(name, value)
				}
			}
			var stdout, stderr bytes.Buffer
			status := run(context.Background(), c.args, strings.NewReader(""), &stdout, &stderr)
			if status != exitUsage || !strings.Contains(stderr.String(), c.want) || stdout.Len() > 0 {
				t.Errorf("%d, %q", status, stderr.String())
			}
		})
	}
}

// A rank that can't go on ends the others, which say whose fault it is.
func TestRanksFail(t *testing.T) {
	if !reftest.Every(t) {
		t.Skip("package ranks tests the same of a small graph")
	}
	if rankstest.Child() {
		args := []string{"-device", "gpu", "-prompt", "Once upon a time", "-n", "3"}
		asRank(t, args...)
		return
	}
	all := rankstest.Run(t, 2, []string{"FAKE_NCCL_ASYNC=2"})
	for rank, r := range all {
		if r.Err != nil || !strings.HasPrefix(r.Text, "1\n") || !strings.Contains(r.Text, "remote process exited") {
			t.Errorf("rank %d: %v: %s\n%s", rank, r.Err, r.Text, r.Output)
		}
	}
}
