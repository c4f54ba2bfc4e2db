package nn_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Example_packed packs documents of different lengths for training: their rows follow one another, and only attention, between two
// Embeddings, has a sequence for each document. Lengths and places are data, so one graph serves all batches.
func Example_packed() {
	const documents, longest, rows, dim = 3, 4, 6, 2
	g := G.NewGraph()
	x := input(g, "rows of documents", dim, 1, 0, 0, 1, 1, 1, 2, 0, 0, 2, 3, 3)
	lengths := []int{2, 0, 4} // of documents, of which one is not there
	slots, back := pack(lengths, longest)

	// (rows, dim) -> (documents, heads, longest, dim), attention, and back
	y, err := nn.Embedding(x, ids(g, "slots", slots...), nil)
	check(err)
	y, err = nn.Reshape(y, documents, 1, longest, dim)
	check(err)
	n := ids(g, "lengths", lengths...)
	other, err := nn.Scale(y, 1) // q and k must be two nodes
	check(err)
	v, err := nn.Scale(y, 2)
	check(err)
	y, err = la.Attention(y, other, v, la.WithCausal(), la.WithLengths(n), la.WithQueryLengths(n))
	check(err)
	y, err = nn.Reshape(y, documents*longest, dim)
	check(err)
	y, err = nn.Embedding(y, ids(g, "back", back...), nil)
	check(err)

	run(g)
	for i, x := range y.Value().Data().([]float32) {
		if i == 0 || i == dim*lengths[0] { // the first row of a document sees itself alone
			fmt.Println(x, y.Value().Data().([]float32)[i+1])
		}
	}
	// Output:
	// 2 0
	// 2 2
}

// pack returns for each slot of each document its row, and for each row its slot. Slots behind a document have any row.
func pack(lengths []int, longest int) (slots, back []int) {
	rows := 0
	for _, n := range lengths {
		rows += n
	}
	from := 0
	for b, n := range lengths {
		for i := range longest {
			if i >= n {
				slots = append(slots, (b*longest+i)%rows) // not all the same: a row's gradient has a term for each
				continue
			}
			slots, back = append(slots, from+i), append(back, b*longest+i)
		}
		from += n
	}
	return slots, back
}

const (
	packedWords, packedDim, packedHeads = 9, 64, 1
	packedDocuments, packedLongest      = 4, 40
)

// packedModel is a layer of attention and a loss, of packed documents, or of one that fills the rows.
type packedModel struct {
	data    map[string][]int32 // tokens, positions, targets; slots, back, lengths of packed ones
	loss    *G.Node
	weights G.Nodes
	vm      G.VM
	onGPU   map[string]*device.Tensor // data in GPU memory, as a recording wants; nil: the graph copies data
}

func newPackedModel(t *testing.T, gpu *device.GPU, weights map[string]*tensor.Dense, rows int, packed, recorded bool) *packedModel {
	t.Helper()
	m, g := &packedModel{data: map[string][]int32{}}, G.NewGraph()
	if recorded {
		m.onGPU = map[string]*device.Tensor{}
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	upload := func(v *tensor.Dense) *device.Tensor {
		t.Helper()
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	leaf := func(name string, v G.Value) *G.Node {
		return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	data := func(name string, n int) *G.Node {
		m.data[name] = make([]int32, n)
		return leaf(name, tensor.New(tensor.WithShape(n), tensor.WithBacking(m.data[name])))
	}
	there := func(n *G.Node) *G.Node {
		switch v := n.Value().(*tensor.Dense); {
		case recorded:
			m.onGPU[n.Name()] = upload(v)
			return leaf(n.Name()+" there", m.onGPU[n.Name()])
		case gpu != nil:
			return must(device.ToGPU(n, gpu))
		}
		return n
	}
	weight := func(name string) *G.Node {
		var v G.Value = weights[name].Clone().(*tensor.Dense)
		if gpu != nil {
			v = upload(weights[name])
		}
		m.weights = append(m.weights, leaf(name, v))
		return m.weights[len(m.weights)-1]
	}
	x := must(nn.Embedding(weight("positions"), there(data("places", rows)), nil))
	x = must(nn.Embedding(weight("words"), there(data("tokens", rows)), x))
	var slots, back, n *G.Node
	batch, longest := 1, rows
	if packed {
		batch, longest = packedDocuments, packedLongest
		slots, back, n = there(data("slots", batch*longest)), there(data("back", rows)), data("lengths", batch)
	}
	var qkv [3]*G.Node
	for i, name := range []string{"q", "k", "v"} {
		y := must(nn.Linear(x, weight(name), nil))
		if packed {
			y = must(nn.Embedding(y, slots, nil))
		}
		if qkv[i] = must(nn.SplitHeads(must(nn.Reshape(y, batch, longest, packedDim)), packedHeads)); gpu != nil {
			qkv[i] = must(nn.Convert(qkv[i], la.Float16))
		}
	}
	opts := []la.Option{la.WithCausal()}
	if packed {
		opts = append(opts, la.WithLengths(n), la.WithQueryLengths(n))
	}
	y := must(la.Attention(qkv[0], qkv[1], qkv[2], opts...))
	if gpu != nil {
		y = must(nn.Convert(y, tensor.Float32))
	}
	if y = must(nn.Reshape(must(nn.MergeHeads(y)), batch*longest, packedDim)); packed {
		y = must(nn.Embedding(y, back, nil))
	}
	y = must(nn.Linear(y, weight("output"), nil, nn.WithResidual(x)))
	m.loss = must(nn.CrossEntropy(y, weight("letters"), nil, there(data("targets", rows))))
	if _, err := nn.Backpropagate(G.Nodes{m.loss}, G.Nodes{there(leaf("ones", tensor.Ones(tensor.Float32, rows)))}, m.weights); err != nil {
		t.Fatal(err)
	}
	if gpu != nil && !recorded {
		m.loss = must(device.ToHost(m.loss))
	}
	m.vm = G.NewTapeMachine(g)
	t.Cleanup(func() { m.vm.Close() })
	return m
}

// let gives the model documents.
func (m *packedModel) let(t *testing.T, documents ...[]int32) {
	t.Helper()
	at, longest := 0, packedLongest
	var lengths []int
	for _, d := range documents {
		for i, word := range d {
			m.data["tokens"][at], m.data["places"][at], m.data["targets"][at] = word, int32(i), -1
			if i+1 < len(d) {
				m.data["targets"][at] = d[i+1]
			}
			at++
		}
		lengths = append(lengths, len(d))
	}
	if m.data["slots"] != nil {
		slots, back := pack(lengths, longest)
		for name, x := range map[string][]int{"slots": slots, "back": back, "lengths": lengths} {
			for i, v := range x {
				m.data[name][i] = int32(v)
			}
		}
	}
	for name, d := range m.onGPU {
		if x := m.data[name]; x != nil {
			if err := d.CopyFrom(tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x))); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// run returns the loss of each row.
func (m *packedModel) run(t *testing.T, documents ...[]int32) []float32 {
	t.Helper()
	m.let(t, documents...)
	m.vm.Reset()
	if err := la.Cause(m.vm.RunAll()); err != nil {
		t.Fatal(err)
	}
	return m.losses(t)
}

func (m *packedModel) losses(t *testing.T) []float32 {
	t.Helper()
	v := m.loss.Value()
	if d, ok := v.(*device.Tensor); ok {
		there, err := d.Download()
		if err != nil {
			t.Fatal(err)
		}
		v = there
	}
	return slices.Clone(v.Data().([]float32))
}

// gradients returns the gradient of each weight.
func (m *packedModel) gradients(t *testing.T) (all [][]float32) {
	t.Helper()
	for _, w := range m.weights {
		v, err := w.Grad()
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := v.(*device.Tensor); ok {
			if v, err = d.Download(); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, slices.Clone(v.Data().([]float32)))
	}
	return all
}

func packedWeights(rng *rand.Rand) map[string]*tensor.Dense {
	weights := map[string]*tensor.Dense{}
	for i, name := range []string{"positions", "words", "letters", "q", "k", "v", "output"} {
		rows := append([]int{packedLongest, packedWords, packedWords}, slices.Repeat([]int{packedDim}, 4)...)[i]
		x := make([]float32, rows*packedDim)
		for i := range x {
			x[i] = float32(rng.NormFloat64() / math.Sqrt(packedDim))
		}
		weights[name] = tensor.New(tensor.WithShape(rows, packedDim), tensor.WithBacking(x))
	}
	return weights
}

// testPacked: losses and gradients of packed documents are those of each document alone, of any lengths in one graph. A document sees
// no other one, to the bit.
func testPacked(t *testing.T, gpu *device.GPU, rows, batches int, off float64) {
	rng := reftest.Rand(t)
	weights := packedWeights(rng)
	m := newPackedModel(t, gpu, weights, rows, true, false)
	for batch := range batches {
		documents := make([][]int32, packedDocuments)
		for range rows { // some documents may have no rows
			i := min(rng.IntN(packedDocuments), (batch+1)%packedDocuments)
			if len(documents[i]) == packedLongest {
				i = slices.IndexFunc(documents, func(d []int32) bool { return len(d) < packedLongest })
			}
			documents[i] = append(documents[i], int32(rng.IntN(packedWords)))
		}
		losses := m.run(t, documents...)
		grads := m.gradients(t)
		var want []float32
		sums := make([][]float64, len(grads))
		for i := range grads {
			sums[i] = make([]float64, len(grads[i]))
		}
		for _, d := range documents {
			if len(d) == 0 {
				continue
			}
			alone := newPackedModel(t, nil, weights, len(d), false, false)
			want = append(want, alone.run(t, d)...)
			for i, g := range alone.gradients(t) {
				for k, x := range g {
					sums[i][k] += float64(x)
				}
			}
		}
		for row := range losses {
			if !(math.Abs(float64(losses[row]-want[row])) <= off) {
				t.Fatalf("batch %d, row %d: the loss is %v, alone %v", batch, row, losses[row], want[row])
			}
		}
		for i := range grads {
			most := 0.0
			for _, x := range sums[i] {
				most = max(most, math.Abs(x))
			}
			for k, x := range grads[i] {
				if !(math.Abs(float64(x)-sums[i][k]) <= off*most) {
					t.Fatalf("batch %d, %v: gradient %d is %v, of documents alone %v; the largest is %v", batch, m.weights[i], k, x, sums[i][k], most)
				}
			}
		}
		from := 0
		for i, d := range documents { // another document
			if len(d) < 2 {
				from += len(d)
				continue
			}
			d[0] = (d[0] + 1) % packedWords
			for row, loss := range m.run(t, documents...) {
				if row < from || row >= from+len(d) {
					if loss != losses[row] {
						t.Fatalf("batch %d: row %d sees document %d", batch, row, i)
					}
				} else if row == from && loss == losses[row] {
					t.Fatalf("batch %d: row %d has the loss of another token", batch, row)
				}
			}
			break
		}
	}
}

func TestTrainPacked(t *testing.T) { testPacked(t, nil, 100, 4, 1e-5) }

func TestGPUOpsTrainPacked(t *testing.T) {
	rows, batches := 24, 1
	if reftest.Every(t) {
		rows, batches = 100, 4
	}
	testPacked(t, devicetest.Open(t), rows, batches, 4e-3)
}

// A training step in a recording, with attention, a loss and all gradients: replays and a solver's steps between them train as the machine
// does, to the bit.
func TestGPUOpsTrainRecorded(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	const rows, steps = 12, 3
	weights := packedWeights(rng)
	solver := func() *nn.AdamW {
		return &nn.AdamW{Rate: 0.01, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, Rows: rows - 1}
	}
	m, want := newPackedModel(t, gpu, weights, rows, false, true), newPackedModel(t, gpu, weights, rows, false, false)
	s, wantSolver := solver(), solver()
	var recording *device.Recording
	for step := range steps {
		document := make([]int32, rows)
		for i := range document {
			document[i] = int32(rng.IntN(packedWords))
		}
		losses := want.run(t, document)
		if err := wantSolver.Step(G.NodesToValueGrads(want.weights)); err != nil {
			t.Fatal(err)
		}
		if step == 0 { // nodes get their memory
			m.run(t, document)
		}
		if m.let(t, document); step == 1 {
			m.vm.Reset()
			var err error
			if recording, err = gpu.Record(func() error { return la.Cause(m.vm.RunAll()) }); err != nil {
				t.Fatal(err)
			}
			defer recording.Close()
		}
		if step > 0 {
			if err := recording.Replay(); err != nil {
				t.Fatal(err)
			}
		}
		if got := m.losses(t); !slices.Equal(got, losses) {
			t.Errorf("step %d: losses %v, of the machine %v", step, got, losses)
		}
		if err := s.Step(G.NodesToValueGrads(m.weights)); err != nil {
			t.Fatal(err)
		}
	}
	for i, w := range m.weights {
		a, err := w.Value().(*device.Tensor).Download()
		b, other := want.weights[i].Value().(*device.Tensor).Download()
		if err != nil || other != nil {
			t.Fatal(err, other)
		}
		if !slices.Equal(a.Data().([]float32), b.Data().([]float32)) {
			t.Errorf("%v differs from the machine's", w)
		}
	}
}

// A row of the first token of a document sees itself alone, so pack is right.
func TestPack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		lengths, rows := make([]int, 5), 0
		for i := range lengths {
			lengths[i] = rng.IntN(4)
			rows += lengths[i]
		}
		if rows == 0 {
			continue
		}
		slots, back := pack(lengths, 3)
		if len(slots) != 15 || len(back) != rows {
			t.Fatalf("%d slots, %d rows of lengths %v", len(slots), len(back), lengths)
		}
		for row, slot := range back {
			if slots[slot] != row {
				t.Fatalf("lengths %v: row %d is in slot %d, which has row %d", lengths, row, slot, slots[slot])
			}
		}
	}
}
