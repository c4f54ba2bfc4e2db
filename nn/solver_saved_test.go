package nn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/operand"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// trainer is a solver that is saved.
type trainer interface {
	G.Solver
	Accumulate([]G.ValueGrad) error
	Save(io.Writer, []G.ValueGrad) error
	Load(io.Reader, []G.ValueGrad) error
}

// trainee is a model in a graph, with a hidden layer whose output has 16 bits if half is set, and a loss.
type trainee struct {
	weights           G.Nodes
	x, targets, scale *tensor.Dense
	loss              *G.Node
	machine           G.VM
}

const traineeRows, traineeWidth, traineeWords = 5, 8, 7

// newTrainee makes a model with random weights, whose gradient is that of the scaled sum of the rows' loss.
func newTrainee(t *testing.T, rng *rand.Rand, gpu *device.GPU, dtype tensor.Dtype, half bool) *trainee {
	t.Helper()
	g, m := G.NewGraph(), new(trainee)
	in := func(name string, v *tensor.Dense) *G.Node {
		n := G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
		if gpu != nil {
			n = G.Must(device.ToGPU(n, gpu))
		}
		return n
	}
	weight := func(name string, shape ...int) *G.Node {
		var v G.Value = values(t, randomInput(rng, name, shape...), dtype, false)
		if gpu != nil {
			v = uploads(t, gpu)(v.(*tensor.Dense))
		}
		n := G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(v))
		m.weights = append(m.weights, n)
		return n
	}
	m.x = values(t, randomInput(rng, "x", traineeRows, traineeWidth), dtype, false)
	m.targets = tensor.New(tensor.WithShape(traineeRows), tensor.Of(tensor.Int32))
	m.scale = values(t, randomInput(rng, "scale", traineeRows), dtype, false)
	h := G.Must(Linear(in("x", m.x), weight("up", 8, traineeWidth), weight("bias", 8), WithActivation(GELU)))
	if half {
		h = G.Must(Convert(G.Must(Convert(h, la.Float16)), dtype))
	}
	m.loss = G.Must(CrossEntropy(h, weight("letters", traineeWords, 8), nil, in("targets", m.targets)))
	if _, err := Backpropagate(G.Nodes{m.loss}, G.Nodes{in("scale", m.scale)}, m.weights); err != nil {
		t.Fatal(err)
	}
	var opts []G.VMOpt
	if gpu == nil {
		opts = append(opts, G.BindDualValues(m.weights...))
	} else {
		m.loss = G.Must(device.ToHost(m.loss))
	}
	m.machine = G.NewTapeMachine(g, opts...)
	t.Cleanup(func() { m.machine.Close() })
	return m
}

// run computes the gradients of some rows, and returns the loss of them.
func (m *trainee) run(t *testing.T, rng *rand.Rand, scale float64, rows int) (sum float64) {
	t.Helper()
	x, targets := randomInput(rng, "x", traineeRows, traineeWidth), m.targets.Data().([]int32)
	for i := range targets {
		if targets[i] = -1; i < rows {
			targets[i] = int32(rng.IntN(traineeWords))
		}
	}
	switch to := m.x.Data().(type) {
	case []float64:
		copy(to, x.x)
		for i := range targets {
			m.scale.Data().([]float64)[i] = scale
		}
	case []float32:
		copy(to, floats32(x.x))
		for i := range targets {
			m.scale.Data().([]float32)[i] = float32(scale)
		}
	}
	m.machine.Reset()
	if err := la.Cause(m.machine.RunAll()); err != nil {
		t.Fatal(err)
	}
	for _, x := range floatsOf(t, m.loss.Value()) {
		sum += x
	}
	return sum
}

func (m *trainee) model() []G.ValueGrad { return G.NodesToValueGrads(m.weights) }

// bits returns all weights.
func (m *trainee) bits(t *testing.T) (all []float64) {
	t.Helper()
	for _, w := range m.weights {
		all = append(all, floatsOf(t, inHostMemory(t, w.Value()))...)
	}
	return all
}

// inHostMemory returns a value of either place.
func inHostMemory(t *testing.T, v G.Value) G.Value {
	if _, ok := v.(*device.Tensor); ok {
		return downloaded(t, v)
	}
	return v
}

// trainerNames are the solvers in a fixed order, since random numbers follow one another.
var trainerNames = []string{"AdamW", "SGD"}

func newTrainers() map[string]func() trainer {
	return map[string]func() trainer{
		"AdamW": func() trainer {
			return &AdamW{Rate: 0.01, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Decay: 0.1, Clip: 1, Rows: 8, Scale: 1 << 16, Grow: 3}
		},
		"SGD": func() trainer { return &SGD{Rate: 0.1, Decay: 0.1, Rows: 8, Scale: 1 << 16, Grow: 3} },
	}
}

// scaleOf returns the scale of the loss.
func scaleOf(s trainer) float64 {
	if a, ok := s.(*AdamW); ok {
		return a.Scale
	}
	return s.(*SGD).Scale
}

// steps trains with batches of two runs.
func (m *trainee) steps(t *testing.T, rng *rand.Rand, s trainer, n int) (loss float64) {
	t.Helper()
	for range n {
		loss = m.run(t, rng, scaleOf(s), 3)
		if err := s.Accumulate(m.model()); err != nil {
			t.Fatal(err)
		}
		loss += m.run(t, rng, scaleOf(s), 5)
		if err := s.Step(m.model()); err != nil {
			t.Fatal(err)
		}
	}
	return loss
}

func checkpoint(t testing.TB, s trainer, model []G.ValueGrad) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := s.Save(&b, model); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func testResumes(t *testing.T, gpu *device.GPU, dtype tensor.Dtype) {
	rng := seeded(t)
	seed := rng.Uint64()
	random := func(i uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, i)) }
	begin, more := []int{0, 1, 4}, 6
	if gpu != nil {
		begin, more = []int{2}, 3
	}
	for _, name := range trainerNames {
		solver := newTrainers()[name]
		for _, steps := range begin {
			m, s := newTrainee(t, rng, gpu, dtype, dtype == tensor.Float32), solver()
			m.steps(t, random(1), s, steps)
			saved := checkpoint(t, s, m.model())
			before := m.bits(t)
			m.steps(t, random(2), s, more)
			want, wantScale := m.bits(t), scaleOf(s)
			if slices.Equal(want, before) {
				t.Errorf("%s: the steps change nothing", name)
			}

			again, resumed := newTrainee(t, rng, gpu, dtype, dtype == tensor.Float32), solver()
			if err := resumed.Load(bytes.NewReader(saved), again.model()); err != nil {
				t.Fatalf("%s, %d steps: %v", name, steps, err)
			}
			if got := again.bits(t); !slices.Equal(got, before) {
				t.Fatalf("%s, %d steps: weights are %v, saved %v", name, steps, got, before)
			}
			if got := checkpoint(t, resumed, again.model()); !bytes.Equal(got, saved) {
				t.Errorf("%s, %d steps: a checkpoint of what was loaded differs", name, steps)
			}
			again.steps(t, random(2), resumed, more)
			if got := again.bits(t); !slices.Equal(got, want) || scaleOf(resumed) != wantScale {
				t.Errorf("%s, %d steps: the weights are %v, without a break %v", name, steps, got, want)
			}
			// Back in the first solver, which has gone on.
			if err := s.Load(bytes.NewReader(saved), m.model()); err != nil {
				t.Fatal(err)
			}
			m.steps(t, random(2), s, more)
			if got := m.bits(t); !slices.Equal(got, want) {
				t.Errorf("%s, %d steps: the second course differs", name, steps)
			}
		}
	}
}

// A training that is resumed in a fresh graph has the bits of one without a break.
func TestSolverResumes(t *testing.T) {
	testResumes(t, nil, tensor.Float32)
	testResumes(t, nil, tensor.Float64)
}

func TestGPUOpsSolverResumes(t *testing.T) { testResumes(t, devicetest.Open(t), tensor.Float32) }

// A checkpoint of host memory and one of a GPU are the same bytes, and either resumes in the other place.
func TestGPUOpsSolverMoves(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	for _, name := range trainerNames {
		solver := newTrainers()[name]
		var model [2][]G.ValueGrad
		for i, shape := range solverSizes(rng) {
			w := randomInput(rng, fmt.Sprint(i), shape...)
			model[0] = append(model[0], trainedPair{value: values(t, w, tensor.Float32, false)})
			model[1] = append(model[1], trainedPair{value: uploads(t, gpu)(values(t, w, tensor.Float32, false))})
		}
		gradients := func() {
			for i := range model[0] {
				g := values(t, randomInput(rng, "g", model[0][i].Value().Shape()...), tensor.Float32, false)
				model[1][i] = trainedPair{model[1][i].Value(), uploads(t, gpu)(g)}
				model[0][i] = trainedPair{model[0][i].Value(), g}
			}
		}
		s := [2]trainer{solver(), solver()}
		compare := func(what string) []byte {
			t.Helper()
			a, b := checkpoint(t, s[0], model[0]), checkpoint(t, s[1], model[1])
			if !bytes.Equal(a, b) {
				t.Fatalf("%s, %s: checkpoints of the two places differ", name, what)
			}
			return a
		}
		for step := range 5 {
			for runs := range step + 1 { // all but the last are accumulated
				gradients()
				for i := range s {
					do := s[i].Accumulate
					if runs == step {
						do = s[i].Step
					}
					if err := do(model[i]); err != nil {
						t.Fatal(err)
					}
				}
			}
			compare(fmt.Sprint("step ", step))
		}
		saved := compare("steps")
		gradients()
		for i := range s {
			fresh := solver()
			if err := fresh.Load(bytes.NewReader(saved), model[i]); err != nil {
				t.Fatal(err)
			}
			s[i] = fresh
			if err := s[i].Step(model[i]); err != nil {
				t.Fatal(err)
			}
		}
		compare("after Load")
	}
}

// resum gives a checkpoint of two weights checksums that are right.
func resum(b []byte, head, all int) []byte {
	put := func(at int) {
		if at+4 <= len(b) && at >= 0 {
			binary.LittleEndian.PutUint32(b[at:], operand.Checksum(b[:at]))
		}
	}
	put(savedHead)
	put(head)
	put(all - 4)
	return b
}

// savedPair returns a checkpoint of two steps and its weights, of shapes (2, 3) and (7), and where its two last sums are.
func savedPair(t testing.TB, place func(*tensor.Dense) G.Value) (s *AdamW, model []G.ValueGrad, saved []byte, sum, end int) {
	t.Helper()
	s = &AdamW{Rate: 0.1, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Grow: 5}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, shape := range [][]int{{2, 3}, {7}} {
		w := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(floats32(randomInput(rng, "", shape...).x)))
		model = append(model, trainedPair{place(w), place(w.Clone().(*tensor.Dense))})
	}
	for range 2 {
		if err := s.Step(model); err != nil {
			t.Fatal(err)
		}
	}
	saved = checkpoint(t, s, model)
	sum = savedHead + 4 + (4 + 4 + 16) + (4 + 4 + 8)
	return s, model, saved, sum, len(saved)
}

func testLoadFails(t *testing.T, place func(*tensor.Dense) G.Value) {
	s, model, saved, sum, end := savedPair(t, place)
	if end != sum+4+3*4*13+4 {
		t.Fatalf("a checkpoint has %d bytes", end)
	}
	if err := s.Step(model); err != nil { // the solver has gone on
		t.Fatal(err)
	}
	now := checkpoint(t, s, model)
	fails := func(what string, r io.Reader, is error, says string, into []G.ValueGrad) {
		t.Helper()
		err := s.Load(r, into)
		if !errors.Is(err, is) || !strings.HasPrefix(fmt.Sprint(err), "leanattention: nn.AdamW.Load: ") || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %v, %q", what, err, is, says)
		}
		if got := checkpoint(t, s, model); !bytes.Equal(got, now) {
			t.Fatalf("%s: the solver or its weights have changed", what)
		}
	}
	for n := range end {
		fails(fmt.Sprintf("%d bytes", n), bytes.NewReader(saved[:n]), la.ErrFormat, "it ends after", model)
		eof := io.ErrUnexpectedEOF
		if n == 0 {
			eof = io.EOF
		}
		fails(fmt.Sprintf("%d bytes", n), bytes.NewReader(saved[:n]), eof, "", model)
	}
	for i := range end {
		bad := slices.Clone(saved)
		bad[i] ^= 1 << (i % 8)
		is := la.ErrFormat
		if i >= 8 && i < 12 {
			is = la.ErrUnsupported
		}
		fails(fmt.Sprintf("byte %d", i), bytes.NewReader(bad), is, "", model)
	}
	change := func(at int, b ...byte) io.Reader {
		bad := slices.Clone(saved)
		copy(bad[at:], b)
		return bytes.NewReader(resum(bad, sum, end))
	}
	broken := errors.New("broken")
	w, v := model[0], model[1]
	other := func(v *tensor.Dense) G.ValueGrad { return trainedPair{value: place(v)} }
	fails("no reader", nil, la.ErrState, "r is nil", model)
	fails("a reader's error", io.MultiReader(bytes.NewReader(saved[:100]), errReader{broken}), broken, "after 100 bytes", model)
	fails("magic", change(0, 'X'), la.ErrFormat, "no checkpoint of a solver", model)
	fails("version", change(8, 2), la.ErrUnsupported, "a checkpoint of version 2; this package reads version 1", model)
	fails("no solver", change(12, 3), la.ErrFormat, "solver 3", model)
	fails("another solver", change(12, 1), la.ErrUnsupported, "a checkpoint of SGD, and the solver is AdamW", model)
	fails("no type", change(16, 0), la.ErrFormat, "element type 0", model)
	fails("another type", change(16, 2), la.ErrDType, "the checkpoint is of float64 and weight 0 of float32", model)
	fails("more weights", change(20, 3), la.ErrShape, "the number of weights is 3 in the checkpoint and 2 in the model", model)
	fails("many weights", change(20, 255, 255, 255, 255), la.ErrShape, "the number of weights is 4294967295 in", model)
	fails("steps", change(24, 255, 255, 255, 255, 255, 255, 255, 255), la.ErrFormat, "steps", model)
	fails("a scale", change(38, 240, 255), la.ErrFormat, "Scale is -Inf", model)
	fails("steps since", change(40, 9), la.ErrFormat, "2 steps, 9 of them", model)
	fails("a long name", change(52, 255, 255), la.ErrFormat, "the length of a name is 65535, more than 4096", model)
	fails("axes", change(56, 33), la.ErrFormat, "a rank is 33, more than 32", model)
	fails("a size", change(60, 4), la.ErrShape, "weight 0 has shape [4 3] in the checkpoint and (2, 3) in the model", model)
	fails("a large size", change(67, 255), la.ErrShape, "in the checkpoint and (2, 3) in the model", model)
	fails("weights in another order", bytes.NewReader(saved), la.ErrState, "in the first step", []G.ValueGrad{v, w})
	fails("no weights", bytes.NewReader(saved), la.ErrGraph, "no weights", nil)
	fails("a weight twice", bytes.NewReader(saved), la.ErrState, "in the first step", []G.ValueGrad{w, w})
	fails("no value", bytes.NewReader(saved), la.ErrGraph, "weight 1 has no value", []G.ValueGrad{w, trainedPair{}})
	fails("integers", bytes.NewReader(saved), la.ErrDType, "weight 0 is of int32", []G.ValueGrad{other(tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Int32))), v})

	// Of fresh solvers, which say what the checkpoint and the model are.
	fresh := func(what string, l trainer, is error, says string, into []G.ValueGrad) {
		t.Helper()
		if err := l.Load(bytes.NewReader(saved), into); !errors.Is(err, is) || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%s: %v, want %v, %q", what, err, is, says)
		}
	}
	fresh("another solver", new(SGD), la.ErrUnsupported, "a checkpoint of AdamW, and the solver is SGD", model)
	fresh("another order", new(AdamW), la.ErrShape, "weight 0 has shape [2 3] in the checkpoint and (7) in the model", []G.ValueGrad{v, w})
	alike := []G.ValueGrad{w, other(values(t, randomInput(seeded(t), "", 2, 3), tensor.Float32, false))}
	if err := new(AdamW).Load(bytes.NewReader(checkpoint(t, new(AdamW), alike)), []G.ValueGrad{w, w}); !errors.Is(err, la.ErrGraph) || !strings.Contains(fmt.Sprint(err), "weight 0 and weight 1 are in the same memory") {
		t.Errorf("a weight twice: %v", err)
	}
	g := G.NewGraph()
	named := func(name string, n G.ValueGrad) G.ValueGrad {
		return G.NewTensor(g, tensor.Float32, n.Value().Shape().Dims(), G.WithShape(n.Value().Shape()...), G.WithName(name), G.WithValue(n.Value()))
	}
	list := []G.ValueGrad{named("a", w), named("b", v)}
	withNames := checkpoint(t, s, list)
	if err := new(AdamW).Load(bytes.NewReader(withNames), []G.ValueGrad{list[0], named("c", v)}); !errors.Is(err, la.ErrGraph) || !strings.Contains(fmt.Sprint(err), `weight 1 is "b" in the checkpoint and "c" in the model`) {
		t.Errorf("another name: %v", err)
	}
	for _, into := range [][]G.ValueGrad{list, model} {
		if err := s.Load(bytes.NewReader(withNames), into); err != nil {
			t.Error(err)
		}
	}
	if err := s.Save(new(bytes.Buffer), []G.ValueGrad{list[0], named(strings.Repeat("x", 4097), v)}); !errors.Is(err, la.ErrLength) {
		t.Errorf("a long name: %v", err)
	}

	// Save.
	if err := s.Save(nil, model); !errors.Is(err, la.ErrState) {
		t.Errorf("no writer: %v", err)
	}
	for _, n := range []int{0, 60, 100, end - 2} {
		if err := s.Save(&limited{n: n}, model); !errors.Is(err, errFull) || !strings.Contains(err.Error(), fmt.Sprintf("after %d bytes", n)) {
			t.Errorf("a writer that is full after %d bytes: %v", n, err)
		}
	}
	s.Epsilon = 0 // no field is needed
	if err := errors.Join(s.Save(new(bytes.Buffer), model), s.Load(bytes.NewReader(saved), model)); err != nil {
		t.Error(err)
	}
	s.Epsilon = 1e-8
	if err := s.Accumulate(model); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(new(bytes.Buffer), model); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "gradients of Accumulate (calls: 1) wait for Step") {
		t.Errorf("between runs: %v", err)
	}
	s.Scale = 2
	for _, do := range []func([]G.ValueGrad) error{s.Step, s.Accumulate} {
		if err := do(model); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "Scale is 2, and was 1 in an earlier run") {
			t.Errorf("another scale: %v", err)
		}
	}
	if err := s.Load(bytes.NewReader(saved), model); err != nil { // drops what was accumulated
		t.Fatal(err)
	}
	if got := checkpoint(t, s, model); !bytes.Equal(got, saved) {
		t.Error("what was accumulated is in the way of Load")
	}
	for _, c := range []struct {
		scale      float64
		rows, grow int
	}{{-1, 0, 0}, {math.NaN(), 0, 0}, {math.Inf(1), 0, 0}, {1e-300, 0, 0}, {0, -1, 0}, {0, 0, -1}} {
		s.Scale, s.Rows, s.Grow = c.scale, c.rows, c.grow
		if err := errors.Join(s.Step(model), nil); !errors.Is(err, la.ErrOption) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

var errFull = errors.New("full")

// limited is a writer of n bytes.
type limited struct{ n int }

func (w *limited) Write(b []byte) (int, error) {
	n := min(len(b), w.n)
	if w.n -= n; n < len(b) {
		return n, errFull
	}
	return n, nil
}

// A checkpoint that is cut short, damaged or of something else changes nothing.
func TestSolverLoadFails(t *testing.T) {
	testLoadFails(t, func(v *tensor.Dense) G.Value { return v })
}

func TestGPUOpsSolverLoadFails(t *testing.T) {
	gpu := devicetest.Open(t)
	testLoadFails(t, uploads(t, gpu))
	s, model, saved, _, _ := savedPair(t, uploads(t, gpu))
	for name, do := range map[string]func() error{
		"Save": func() error { return s.Save(new(bytes.Buffer), model) }, "Load": func() error { return s.Load(bytes.NewReader(saved), model) },
		"Accumulate": func() error { return s.Accumulate(model) },
	} {
		if recording, err := gpu.Record(do); !errors.Is(err, la.ErrState) || recording != nil {
			t.Errorf("%s within a recording: %v", name, err)
		}
	}
}

// Each call of the driver fails once in Load and in Accumulate: the solver and the weights are as before, or the call has no error.
func TestGPUOpsSolverLoadFaults(t *testing.T) {
	lib := system.Failing(t)
	s, model, saved, _, _ := savedPair(t, uploads(t, devicetest.Open(t)))
	if err := s.Step(model); err != nil {
		t.Fatal(err)
	}
	now := checkpoint(t, s, model)
	for name, do := range map[string]func() error{
		"Load": func() error { return s.Load(bytes.NewReader(saved), model) },
		"Step": func() error {
			if err := s.Accumulate(model); err != nil {
				return err
			}
			return s.Step(model)
		},
	} {
		failed := 0
		for call := int64(1); ; call++ {
			if err := s.Load(bytes.NewReader(now), model); err != nil {
				t.Fatal(err)
			}
			at := lib.State().Calls + call
			lib.State().FailAt, lib.State().FailWith = at, 2
			err := do()
			lib.State().FailAt = 0
			if err == nil && lib.State().Calls < at {
				break
			}
			if err != nil {
				if failed++; !errors.Is(err, la.ErrOutOfMemory) {
					t.Errorf("%s, call %d, %s, failed: %v", name, call, lib.State().Failed(), err)
				}
				s.runs = 0 // what Accumulate has done
				if got := checkpoint(t, s, model); !bytes.Equal(got, now) {
					t.Fatalf("%s, behind call %d, %s: the solver or its weights have changed", name, call, lib.State().Failed())
				}
			}
		}
		if failed < 5 {
			t.Errorf("%s: %d calls failed", name, failed)
		}
	}
}

// FuzzLoad gives a solver data that may begin as a checkpoint: it is refused and the solver as it was, or it is what Save writes.
func FuzzLoad(f *testing.F) {
	here := func(v *tensor.Dense) G.Value { return v }
	s, model, good, sum, end := savedPair(f, here)
	f.Add(good, false)
	f.Add(good, true)
	f.Add(good[:70], true)
	f.Add(append(slices.Clone(good), 1), true)
	f.Fuzz(func(t *testing.T, data []byte, sums bool) {
		if sums {
			data = resum(slices.Clone(data), sum, end)
		}
		r := bytes.NewReader(data)
		if err := s.Load(r, model); err != nil {
			if !strings.HasPrefix(err.Error(), "leanattention: nn.AdamW.Load: ") || !bytes.Equal(checkpoint(t, s, model), good) {
				t.Fatal(err)
			}
			return
		}
		if got := checkpoint(t, s, model); len(got) != end || !bytes.Equal(got[sum+4:end-4], data[sum+4:len(data)-r.Len()-4]) || !bytes.Equal(got[:52], data[:52]) {
			t.Fatalf("read %x\nsaved %x", data, got)
		}
		if err := s.Load(bytes.NewReader(good), model); err != nil {
			t.Fatal(err)
		}
	})
}
