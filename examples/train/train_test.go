package main

import (
	"bytes"
	"errors"
	"math"
	"os"
	"os/exec"
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
	}{{"attention", kind{attend: la.Attention, half: true, gpu: gpu}, steps, 2e-3}, {"products", kind{attend: products, gpu: gpu}, min(5*steps, 20), 1e-5}} {
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
	var out bytes.Buffer
	if err := run(2, 1, true, &out); err != nil {
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
	if err := run(13, 1, false, &out); err != nil {
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
