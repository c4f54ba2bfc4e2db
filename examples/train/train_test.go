package main

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	"go.uber.org/goleak"
	G "gorgonia.org/gorgonia"
)

// asCommand is set for a process that is the command itself.
const asCommand = "TRAIN_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		os.Exit(0)
	}
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(m)
}

// short makes the command quick.
func short(t *testing.T) {
	t.Helper()
	wasTrained, wasOnGPU, wasContexts := trained, onGPU, contexts
	t.Cleanup(func() { trained, onGPU, contexts = wasTrained, wasOnGPU, wasContexts })
	trained, onGPU, contexts = size{batch: 2, context: 16, heads: 2, dim: 16, hidden: 16}, size{batch: 2, context: 9, heads: 1, dim: 64, hidden: 16}, []int{32, 128}
}

// TestGradTrain: both attentions learn, and learn the same; leanattention needs less memory, and not four times as much for four
// times the context.
func TestGradTrain(t *testing.T) {
	short(t)
	var courses [2]course
	var allocated [2][2]float64
	for i, a := range []kind{{attend: la.Default}, {attend: la.Attention}} {
		var err error
		if courses[i], err = train(a, trained, 40, 7); err != nil {
			t.Fatal(err)
		}
		for j, n := range contexts {
			s := trained
			s.batch, s.context = 1, n
			c, err := train(a, s, 2, 1)
			if err != nil {
				t.Fatal(err)
			}
			allocated[i][j] = c.mib
		}
		first, last := courses[i].losses[0], courses[i].losses[39]
		if most := math.Log(float64(len(vocabulary))) + 1; !(first < most) || !(last < first-0.5) {
			t.Errorf("attention %d: the loss goes from %v to %v", i, first, last)
		}
	}
	for i, want := range courses[0].losses {
		if got := courses[1].losses[i]; !(math.Abs(got-want) < 1e-4) {
			t.Errorf("step %d: the loss is %v, with the default %v", i, got, want)
		}
	}
	if stock, lean := allocated[0], allocated[1]; lean[1] > stock[1] || lean[1] > 4.2*lean[0] {
		t.Errorf("contexts of %v take %v MiB, with the default %v", contexts, lean, stock)
	}
}

// TestSeed: one seed gives one course, another one another.
func TestSeed(t *testing.T) {
	short(t)
	var losses [3][]float64
	for i, seed := range []uint64{1, 1, 2} {
		c, err := train(kind{attend: la.Attention}, trained, 3, seed)
		if err != nil {
			t.Fatal(err)
		}
		losses[i] = c.losses
	}
	for i := range losses[0] {
		if losses[0][i] != losses[1][i] || losses[0][i] == losses[2][i] {
			t.Errorf("step %d: losses %v", i, losses)
		}
	}
}

// resumes checks that a course in two parts has the losses and the end of one without a break.
func resumes(t *testing.T, k kind, s size) {
	t.Helper()
	want, err := train(k, s, 3, 7)
	if err != nil {
		t.Fatal(err)
	}
	first, err := train(k, s, 1, 7)
	if err != nil {
		t.Fatal(err)
	}
	k.from = first.end.Bytes()
	second, err := train(k, s, 2, 8) // another seed, which -resume replaces
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Concat(first.losses, second.losses); !slices.Equal(got, want.losses) || !bytes.Equal(second.end.Bytes(), want.end.Bytes()) {
		t.Errorf("losses %v, without a break %v", got, want.losses)
	}
}

// TestResume: a course goes on from a file to the bit, and a file that is missing or damaged is an error.
func TestResume(t *testing.T) {
	short(t)
	contexts = nil
	resumes(t, kind{attend: la.Attention}, trained)
	file := func(name string) string { return filepath.Join(t.TempDir(), name) }
	losses := func(steps int, resume, save string) (all []string) {
		var out bytes.Buffer
		if err := run(steps, 3, false, resume, save, &out); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out.String()) {
			if fields := strings.Fields(line); len(fields) == 3 && fields[0] != "step" && fields[0] != "context" {
				all = append(all, fields[2])
			}
		}
		return all
	}
	saved, end, whole := file("saved"), file("end"), file("whole")
	losses(20, os.DevNull, saved)
	got, want := losses(1, saved, end), losses(21, os.DevNull, whole)
	if len(got) != 1 || got[0] != want[len(want)-1] {
		t.Errorf("losses %v, without a break %v", got, want)
	}
	var data [3][]byte
	for i, name := range []string{end, whole, saved} {
		var err error
		if data[i], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(data[0], data[1]) || bytes.Equal(data[0], data[2]) {
		t.Error("the file of a course in two parts differs")
	}
	data[2][len(data[2])/2]++
	for _, bad := range [][]byte{data[0][:len(data[0])-1], data[2], []byte("x")} {
		name := file("bad")
		if err := os.WriteFile(name, bad, 0o666); err != nil {
			t.Fatal(err)
		}
		if err := run(1, 3, false, name, os.DevNull, io.Discard); err == nil {
			t.Errorf("a file of %d bytes is no error", len(bad))
		}
	}
	if err := run(1, 3, false, file("none"), os.DevNull, io.Discard); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// TestGPUTrain: on a GPU, the model has the losses of host memory but for the 16 bits of attention, and the same bits in a second course.
// With a sum of products for attention, all is float32.
func TestGPUTrain(t *testing.T) {
	short(t)
	gpu := devicetest.Open(t)
	products := func(q, k, v *G.Node, _ ...la.Option) (*G.Node, error) {
		y, err := nn.Mul(q, k)
		if err != nil {
			return nil, err
		}
		return nn.Add(y, v)
	}
	steps := 2
	if reftest.Every(t) {
		steps = 20
	}
	for _, c := range []struct {
		name  string
		kind  kind
		steps int
		off   float64
	}{{"attention", kind{attend: la.Attention, half: true, gpu: gpu}, steps, 1e-2}, {"products", kind{attend: products, gpu: gpu}, min(5*steps, 20), 1e-5}} {
		want, err := train(kind{attend: c.kind.attend}, onGPU, c.steps, 7)
		if err != nil {
			t.Fatal(err)
		}
		var courses [2]course
		for i := range courses {
			if courses[i], err = train(c.kind, onGPU, c.steps, 7); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(courses[0].losses, courses[1].losses) {
			t.Errorf("%s: losses %v and then %v", c.name, courses[0].losses, courses[1].losses)
		}
		most := 0.0
		for i, want := range want.losses {
			most = max(most, math.Abs(courses[0].losses[i]-want))
		}
		t.Logf("%s: losses from %v to %v, off by %.2g", c.name, want.losses[0], want.losses[c.steps-1], most)
		if !(most < c.off) {
			t.Errorf("%s: losses %v, in host memory %v", c.name, courses[0].losses, want.losses)
		}
	}
	resumes(t, kind{attend: products, gpu: gpu}, onGPU)
	var out bytes.Buffer
	if err := run(2, 1, true, os.DevNull, os.DevNull, &out); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); !strings.Contains(got, "cpu       gpu\n     1 ") || !strings.Contains(got, "the losses differ by ") || strings.Contains(got, "NaN") {
		t.Errorf("%s", got)
	}
}

// TestCommand: the output has the losses of every tenth step and of the last one, and the memory at each context.
func TestCommand(t *testing.T) {
	short(t)
	var out bytes.Buffer
	if err := run(13, 1, false, os.DevNull, os.DevNull, &out); err != nil {
		t.Fatal(err)
	}
	var first []string
	for line := range strings.Lines(out.String()) {
		if fields := strings.Fields(line); len(fields) == 3 {
			first = append(first, fields[0])
		}
	}
	if got, want := strings.Join(first, " "), "step 1 11 13 context 32 128"; got != want {
		t.Errorf("rows of %q, want %q\n%s", got, want, &out)
	}
	if strings.Contains(out.String(), "NaN") || strings.Contains(out.String(), "Inf") {
		t.Errorf("%s", &out)
	}
}

// TestWrongFlags: a wrong flag or argument ends the command before any output, with status 2.
func TestWrongFlags(t *testing.T) {
	command := func(args ...string) (status int, out, errs string) {
		t.Helper()
		c := exec.Command(os.Args[0], args...)
		c.Env = append(os.Environ(), asCommand+"=1")
		var stdout, stderr bytes.Buffer
		c.Stdout, c.Stderr = &stdout, &stderr
		var ended *exec.ExitError
		if err := c.Run(); err != nil && !errors.As(err, &ended) {
			t.Fatal(err)
		}
		return c.ProcessState.ExitCode(), stdout.String(), stderr.String()
	}
	for _, args := range [][]string{{"-steps", "0"}, {"-steps", "x"}, {"-seed", "-1"}, {"text"}, {"-size", "1"}, {"-device", "tpu"}} {
		if status, out, errs := command(args...); status != 2 || errs == "" || out != "" {
			t.Errorf("%q: exit %d, output %q, error %q", args, status, out, errs)
		}
	}
	if status, _, errs := command("-h"); status != 0 || !strings.Contains(errs, "-steps") {
		t.Errorf("-h: exit %d, %q", status, errs)
	}
}
