//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"

	la "gorgonia.org/leanattention"
)

// failingFrom is a standard error that has the driver's calls of a function fail once a text was written to it.
type failingFrom struct {
	bytes.Buffer
	after string
	fail  func()
}

func (w *failingFrom) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Contains(w.String(), w.after) {
		w.fail()
	}
	return n, err
}

// TestGPUCause: an error of an op on a GPU is told as the op says it, without the machine's instructions and nodes.
func TestGPUCause(t *testing.T) {
	for _, function := range []string{"cuLaunchKernelEx", "cuMemAlloc_v2"} {
		t.Run(function, func(t *testing.T) {
			lib := system.Emulate(t)
			if lib == nil {
				t.Skip("calls fail on demand on an emulated GPU only: LEANATTENTION_GPU=emulated")
			}
			const outOfMemory = 2
			errs := &failingFrom{after: "loaded", fail: func() { lib.State().FailIn(function, outOfMemory) }}
			status := run(t.Context(), []string{"generate", "-device", "gpu", "-p", "Once", "-n", "1"}, streams{nil, &bytes.Buffer{}, errs})
			lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
			last := lines[len(lines)-1]
			if status != exitError || !strings.HasPrefix(last, "leanlm: leanattention: ") || !strings.Contains(last, strings.TrimSuffix(function, "_v2")) {
				t.Errorf("status %d, %s", status, errs)
			}
			for _, dump := range []string{"PC ", "instruction", "Failed to", "op.Do", "Memory["} {
				if strings.Contains(last, dump) {
					t.Errorf("%q in %s", dump, last)
				}
			}
		})
	}
}

// TestGPUTexts: texts on a GPU are those of the CPU: chosen by the GPU and by the host, drawn, stopped, guessed, from a prompt cache,
// and in a conversation. -stats and -json tell the GPU.
func TestGPUTexts(t *testing.T) {
	devicetest.Open(t)
	n := "12"
	if testing.Short() {
		n = "3" // an emulated GPU is slow
	}
	cache := filepath.Join(t.TempDir(), "cache")
	all := [][]string{nil, {"-logprobs", "2"}, {"-temp", "0.7", "-seed", "3"}, {"-stop", "e"}, {"-draft", "4"}, {"-prompt-cache", cache}, {"-prompt-cache", cache}}
	if testing.Short() {
		all = all[1:3]
	}
	for _, flags := range all {
		args := append([]string{"-p", "Once upon a time there was a girl who went to the next", "-n", n}, flags...)
		here := args
		if len(flags) > 0 && flags[0] == "-prompt-cache" {
			here = args[:len(args)-2]
		}
		want, _ := generated(t, here...)
		got, errs := generated(t, append(args, "-device", "gpu", "-stats")...)
		if x, w := got.Texts[0], want.Texts[0]; x.Text != w.Text || fmt.Sprint(x.Tokens) != fmt.Sprint(w.Tokens) || x.Reason != w.Reason || len(x.LogProbs) != len(w.LogProbs) {
			t.Errorf("%v: %+v, want %+v", flags, x, w)
		}
		if !strings.HasPrefix(got.Device, "GPU 0") || want.Device != "cpu" || !strings.Contains(errs, "steps of") {
			t.Errorf("%v: on %q: %s", flags, got.Device, errs)
		}
	}
}

// TestGPUPerplexity: the perplexity on a GPU is that of transformers.
func TestGPUPerplexity(t *testing.T) {
	devicetest.Open(t)
	book, err := os.ReadFile("testdata/held-out.txt")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("testdata/perplexity.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []goldenPerplexity
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c.Text == 0 || c.Text > 1000 {
			continue
		}
		status, out, errs := leanlm(t, string(book[:c.Text]), "perplexity", "-f", "-", "-exact", "-device", "gpu")
		var value float64
		if _, err := fmt.Sscanf(out, "perplexity %f", &value); err != nil || status != 0 || !(math.Abs(value-c.Perplexity) <= 1e-4) {
			t.Errorf("%+v: status %d, %q, %v; %s", c, status, out, err, errs)
		}
	}
}

// asCommand in the environment makes a process of the tests the command.
const asCommand = "LEANLM_TEST_AS_COMMAND"

// TestMemoryLimit: memory that a process may not take is an error of the command. Go would end the process with a dump of all
// goroutines.
func TestMemoryLimit(t *testing.T) {
	if testing.Short() {
		t.Skip("processes with limits of memory")
	}
	long := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 100_000 })
	for name, c := range map[string]struct {
		limit string // of ulimit
		args  []string
		want  string // in the message; "": none
	}{
		"cache":       {"-v 4000000", []string{"-m", long, "-p", "a", "-n", "2", "-c", "100000", "-cache-tokens", "80000000"}, "ulimit -v"},
		"cache, data": {"-d 4000000", []string{"-m", long, "-p", "a", "-n", "2", "-c", "100000", "-cache-tokens", "80000000"}, "ulimit -d"},
		"enough":      {"-v 5000000", []string{"-p", "a", "-n", "2"}, ""},
	} {
		c.args = append([]string{"-c", "ulimit " + c.limit + ` && exec "$0" generate "$@"`, os.Args[0]}, c.args...)
		command := exec.Command("sh", c.args...)
		command.Env = append(os.Environ(), asCommand+"=1")
		out, err := command.CombinedOutput()
		text := string(out)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v\n%.3000s", name, err, text)
		case c.want != "" && (err == nil || command.ProcessState.ExitCode() != exitError || strings.Contains(text, "goroutine ") ||
			!strings.Contains(text, c.want) || !strings.Contains(text, la.ErrOutOfMemory.Error())):
			t.Errorf("%s: %v\n%.3000s", name, err, text)
		}
	}
}
