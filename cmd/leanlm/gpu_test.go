//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/memory"

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
			lib := system.Failing(t)
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
// in a conversation, and with weights of 8 bits. -stats and -json tell the GPU.
func TestGPUTexts(t *testing.T) {
	devicetest.Open(t)
	n := "12"
	if testing.Short() {
		n = "3" // an emulated GPU is slow
	}
	cache := filepath.Join(t.TempDir(), "cache")
	all := [][]string{nil, {"-logprobs", "2"}, {"-weights", "int8", "-exact"}, {"-temp", "0.7", "-seed", "3"}, {"-stop", "e"}, {"-draft", "4"}, {"-prompt-cache", cache}, {"-prompt-cache", cache}}
	if testing.Short() {
		all = all[1:4]
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
		if c.long() || testing.Short() && c.Text > 100 {
			continue // an emulated GPU is slow
		}
		status, out, errs := leanlm(t, string(book[:c.Text]), "perplexity", "-f", "-", "-exact", "-device", "gpu")
		var value float64
		if _, err := fmt.Sscanf(out, "perplexity %f", &value); err != nil || status != 0 || !(math.Abs(value-c.Perplexity) <= 1e-4) {
			t.Errorf("%+v: status %d, %q, %v; %s", c, status, out, err, errs)
		}
	}
}

// emptyModel writes a folder of a model of 400 million weights, which are 0. A file system with holes keeps nothing of them.
func emptyModel(t *testing.T) string {
	t.Helper()
	var config []byte
	dir := writeModel(t, nil)
	rewrite(t, dir, "config.json", func(s string) string {
		s = strings.Replace(s, `"hidden_size":32`, `"hidden_size":2048`, 1)
		s = strings.Replace(s, `"ffn_dim":64`, `"ffn_dim":8192`, 1)
		s = strings.Replace(s, `"num_hidden_layers":2`, `"num_hidden_layers":8`, 1)
		config = []byte(s)
		return s
	})
	network, err := decoder.ReadNetwork(config, 0)
	if err != nil {
		t.Fatal(err)
	}
	header, end := map[string]any{}, int64(0)
	for w := range network.Weights() {
		size := int64(2)
		for _, n := range w.Shape {
			size *= int64(n)
		}
		header[w.Name] = map[string]any{"dtype": "F16", "shape": w.Shape, "data_offsets": []int64{end, end + size}}
		end += size
	}
	h, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model.safetensors")
	if err := os.WriteFile(path, append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 8+int64(len(h))+end); err != nil {
		t.Skip(err)
	}
	return dir
}

// TestLimitGarbage: beside much memory in use the collector begins at 256 MB of garbage, and beside little as before. Nothing changes
// if the collector is off, or if GOGC says something, and restore resets the setting.
func TestLimitGarbage(t *testing.T) {
	for _, c := range []struct {
		inUse         int64
		percent, want int
	}{{0, 100, 100}, {1 << 20, 100, 100}, {256 << 20, 100, 100}, {1 << 30, 100, 25}, {1 << 30, 10, 10}, {4 << 30, 100, 6}, {1 << 40, 100, 1}, {1 << 40, -1, -1}} {
		if p := garbagePercent(c.inUse, c.percent); p != c.want {
			t.Errorf("%d MB in use, %d%%: %d%%, want %d%%", c.inUse>>20, c.percent, p, c.want)
		}
	}
	percent := func() int {
		p := debug.SetGCPercent(100)
		debug.SetGCPercent(p)
		return p
	}
	defer debug.SetGCPercent(debug.SetGCPercent(1 << 20))
	t.Setenv("GOGC", "")
	limit := debug.SetMemoryLimit(-1)
	restore := limitGarbage()
	if p := percent(); p >= 1<<20 {
		t.Errorf("with some MB in use the collector begins at %d%%", p)
	}
	restore()
	if p := percent(); p != 1<<20 || debug.SetMemoryLimit(-1) != limit {
		t.Errorf("then it begins at %d%%, with a limit of %d", p, debug.SetMemoryLimit(-1))
	}
	t.Setenv("GOGC", "100")
	defer limitGarbage()()
	if p := percent(); p != 1<<20 {
		t.Errorf("GOGC is set, and the collector begins at %d%%", p)
	}
}

// TestShortMemory: weights that do not fit the memory are an error with both numbers, and nothing is written.
func TestShortMemory(t *testing.T) {
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{Total: 1 << 40, Of: "a test"}, true })()
	status, out, errs := leanlm(t, "", "generate", "-p", "a", "-n", "1")
	if status != exitError || out != "" || !strings.Contains(errs, la.ErrOutOfMemory.Error()) || !strings.Contains(errs, "a test") {
		t.Errorf("status %d, %q, %s", status, out, errs)
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
	large := emptyModel(t)
	for name, c := range map[string]struct {
		limit string // of ulimit
		args  []string
		want  string // in the message; "": none
	}{
		"cache":       {"-v 4000000", []string{"-m", long, "-p", "a", "-n", "2", "-c", "100000", "-cache-tokens", "80000000"}, "ulimit -v"},
		"cache, data": {"-d 4000000", []string{"-m", long, "-p", "a", "-n", "2", "-c", "100000", "-cache-tokens", "80000000"}, "ulimit -d"},
		"weights":     {"-v 3500000", []string{"-m", large, "-p", "a", "-n", "1", "-weights", "f32"}, "weights of at least 16"},
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
