//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/rankstest"

	"go.uber.org/goleak"
)

// TestMain is also the command itself, for tests that need a process of it.
func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	goleak.VerifyTestMain(rankstest.Main{M: m})
}

// rankFlags has the flags of each rank: those of rank 0, two bars, and those of rank 1.
const rankFlags = "LEANLM_TEST_FLAGS"

// asRank runs the command as one of the ranks.
func asRank(t *testing.T) {
	t.Helper()
	system.Emulate(t)
	flags, one, _ := strings.Cut(os.Getenv(rankFlags), "||")
	if os.Getenv("RANK") == "1" {
		flags = one
	}
	var out, err bytes.Buffer
	status := run(context.Background(), strings.Split(flags, "|"), streams{strings.NewReader(""), &out, &err})
	rankstest.Write(t, fmt.Sprintf("%d\n%s\n%s", status, out.String(), err.String()))
}

// TestRanks: two ranks with two GPUs each write what one process on a CPU does, by rank 0 alone. What tells of the texts may differ.
// The model is small, since emulated GPUs are slow: a head of attention for each GPU. GOGC saves a quarter of the time.
func TestRanks(t *testing.T) {
	if rankstest.Child() {
		asRank(t)
		return
	}
	dir := writeModel(t, func(c map[string]any) { c["hidden_size"], c["num_hidden_layers"] = 256, 1 })
	texts := "generate|-m|" + dir + "|-p|abcabc|-p|abca|-n|3|-draft|2"
	status, want, errs := leanlm(t, "", strings.Split(texts, "|")...)
	if status != 0 || len(want) < 16 {
		t.Fatalf("one process: status %d, %q, %s", status, want, errs)
	}
	two := rankstest.Run(t, 2, []string{rankFlags + "=" + texts + "|-device|gpu:0,1|-stats||" + texts + "|-device|gpu:2,3", "GOGC=400"})
	for _, r := range two {
		if r.Err != nil || !strings.HasPrefix(r.Text, "0\n") {
			t.Fatalf("%v: %s\n%s", r.Err, r.Text, r.Output)
		}
	}
	if !strings.HasPrefix(two[0].Text, "0\n"+want) {
		t.Errorf("one process writes %q, two %q", want, two[0].Text)
	}
	if !strings.Contains(two[0].Text, "rank 0 of 2 on GPU 0 (Fake 0) with GPU 1 (Fake 1)\n") || strings.Contains(two[1].Text, "loaded") || strings.Contains(two[1].Text, "abc") {
		t.Errorf("rank 0 writes %q, rank 1 %q", two[0].Text, two[1].Text)
	}
}

// TestRanksDiffer: ranks that do not belong together end with an error that says what differs.
func TestRanksDiffer(t *testing.T) {
	if rankstest.Child() {
		asRank(t)
		return
	}
	file := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(file, []byte("a little lion"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := "generate|-device|gpu|-p|a little girl|-n|2"
	for _, c := range []struct{ zero, one, want string }{
		{base, "generate|-device|gpu|-n|2|-f|" + file, `"prompt 1: a little lion"`},
		{base + "|-temp|0.5", base + "|-temp|0.6|-exact", `"-temp 0.6"`},
	} {
		for rank, r := range rankstest.Run(t, 2, []string{rankFlags + "=" + c.zero + "||" + c.one}) {
			if r.Err != nil || !strings.HasPrefix(r.Text, "1\n\n") || !strings.Contains(r.Text, c.want) {
				t.Errorf("rank %d: %v: %q, want %s\n%s", rank, r.Err, r.Text, c.want, r.Output)
			}
		}
	}
	for flags, want := range map[string]string{
		"chat|-device|gpu":      "a conversation has one process",
		"generate|-p|x":         "ranks compute on GPUs",
		"perplexity|-f|" + file: "ranks compute on GPUs",
	} {
		for rank, r := range rankstest.Run(t, 2, []string{rankFlags + "=" + flags + "||" + flags}) {
			if r.Err != nil || !strings.HasPrefix(r.Text, "2\n\n") || !strings.Contains(r.Text, want) {
				t.Errorf("rank %d: %v: %q, want %s\n%s", rank, r.Err, r.Text, want, r.Output)
			}
		}
	}
}

// TestRanksRefused: what ranks cannot do is refused by name, and so is a wrong environment.
func TestRanksRefused(t *testing.T) {
	prompt := []string{"generate", "-p", "Once"}
	for _, c := range []struct {
		args   []string
		env    string
		status int
		want   string
	}{
		{prompt, "", exitUsage, "WORLD_SIZE is 2, and -device is cpu"},
		{append(prompt, "-device", "gpu"), "RANK=2", exitError, `RANK is "2", want a number from 0 to 1`},
		{append(prompt, "-device", "gpu"), "RANK=", exitError, `RANK is ""`},
		{append(prompt, "-device", "gpu"), "MASTER_PORT=", exitError, `MASTER_PORT is ""`},
		{append(prompt, "-device", "gpu"), "WORLD_SIZE=x", exitError, `WORLD_SIZE is "x"`},
	} {
		t.Run(c.want, func(t *testing.T) {
			for _, e := range []string{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1", c.env} {
				if name, value, ok := strings.Cut(e, "="); ok {
					t.Setenv(name, value)
				}
			}
			if status, out, errs := leanlm(t, "", c.args...); status != c.status || out != "" || !strings.Contains(errs, c.want) {
				t.Errorf("status %d, %q, %s", status, out, errs)
			}
		})
	}
}
