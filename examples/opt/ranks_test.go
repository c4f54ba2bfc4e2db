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
			where := map[string]string{"gpu": "rank 0 of 2 on GPU 0 (Fake 0), NCCL", "gpu:0,1": "rank 0 of 2 on GPU 0 (Fake 0) with GPU 1 (Fake 1), NCCL"}[named]
			if !strings.Contains(two[0].Text, where) || two[1].Text != "0\n\n" {
				t.Errorf("%s: rank 0 writes %q, rank 1 %q", c, two[0].Text, two[1].Text)
			}
		}
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
