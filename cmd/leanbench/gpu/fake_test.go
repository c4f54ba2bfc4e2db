//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// fakeGPU has openDevice find a driver that needs no GPU, and whose kernels do
// nothing. When the test ends nothing may be left in it.
func fakeGPU(t *testing.T, capability int32) *fakedriver.Library {
	t.Helper()
	lib := enginetest.Stub(t, capability)
	t.Cleanup(UseDriver(func() (*cuda.Driver, error) { return cuda.LoadFrom(lib.Path) }, enginetest.PrepareModules))
	return lib
}

func openFake(t *testing.T) *gpuDevice {
	t.Helper()
	driver, err := LoadDriver()
	if err != nil {
		t.Fatal(err)
	}
	d, err := OpenDevice(driver, 0, measuretest.Rand(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestFakeBudget: what has a name is measured, and of the sweep what there is time
// and memory for.
func TestFakeBudget(t *testing.T) {
	fakeGPU(t, 90)
	for _, budget := range []time.Duration{0, 30 * time.Second} {
		b := &Bench{Device: openFake(t), Report: &measure.Report{}, Options: Options{budget: budget}, always: namedCases()}
		b.always = slices.DeleteFunc(b.always, func(c gpuCase) bool { return c.shape.Region() > 1<<30 })
		cases, err := b.cases()
		if err != nil {
			t.Fatal(err)
		}
		sum := time.Duration(0)
		for i, c := range cases {
			if i < len(b.always) != (c.table == tableNamed) {
				t.Errorf("case %d is of %q", i, c.table)
			}
			if c.shape.Region() > 1<<32 {
				t.Errorf("%v takes %d bytes", c.shape, c.shape.Region())
			}
			sum += c.cost()
		}
		if more := len(cases) > len(b.always); more != (budget > 0) || more && (sum > budget || sum < budget/2) {
			t.Errorf("budget of %v: %d cases in %v", budget, len(cases), sum)
		}
		b.Options.full = true
		if all, err := b.cases(); err != nil || len(all) < 300 {
			t.Errorf("%d cases in all (%v)", len(all), err)
		}
		b.always = raggedCases()
		b.peers = new(gpuPeers) // which take half of the memory
		if _, err := b.cases(); !errors.Is(err, cuda.ErrOutOfMemory) || !strings.Contains(err.Error(), "131072") {
			t.Errorf("no memory: %v", err)
		}
	}
}

// TestGPUAlways: the command's own cases have every table that has bars, and
// fit what a GPU with 80 GiB leaves them beside peers.
func TestGPUAlways(t *testing.T) {
	b := NewBench(Options{}, measure.Machine{}, io.Discard, io.Discard)
	tables := make(map[string]int)
	for _, c := range b.always {
		tables[c.table]++
		if c.shape.Region() > 32<<30 {
			t.Errorf("%v takes %d bytes", c.shape, c.shape.Region())
		}
	}
	for table, want := range map[string]int{tableNamed: len(namedCases()), tableRagged: len(raggedCases()), tableGroups: len(groupCases())} {
		if want == 0 || tables[table] != want {
			t.Errorf("%d cases of %q, want %d", tables[table], table, want)
		}
	}
}

// TestFakeArena: what is on the GPU is what the host believes.
func TestFakeArena(t *testing.T) {
	fakeGPU(t, 90)
	d := openFake(t)
	const size, period = 100_000, 7168
	if err := d.Fill(size, period); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, size)
	if err := d.keys.Download(got, 0); err != nil {
		t.Fatal(err)
	}
	for i := int64(0); i+64 <= size/2; i += 64 {
		for j, x := range d.row(i, 64) {
			if at := 2 * (int(i) + j); uint16(x) != uint16(got[at])|uint16(got[at+1])<<8 {
				t.Fatalf("element %d differs", at/2)
			}
		}
	}
}

// TestFakeVerify: kernels that do nothing are found out.
func TestFakeVerify(t *testing.T) {
	fakeGPU(t, 90)
	d := openFake(t)
	s := EvenShape(1, 8, 2, 1<<16, 64)
	if err := d.Fill(int64(s.Sets())*s.Region(), ArenaPeriod); err != nil {
		t.Fatal(err)
	}
	b := &Bench{Device: d, Report: &measure.Report{}}
	ragged := Shape{heads: 8, kvHeads: 2, dim: 64, lengths: []int{1 << 15, 1 << 14}}
	for page, c := range map[int]gpuCase{0: {shape: s}, 16: {shape: ragged, pages: []int{16}}} {
		if err := b.measure(c); err == nil || !strings.Contains(err.Error(), "is NaN; it should be") || errors.Is(err, cuda.ErrClosed) {
			t.Errorf("pages of %d: error %v", page, err)
		}
	}
}

// TestFakeGPU goes through the whole command.
func TestFakeGPU(t *testing.T) {
	for _, capability := range []int32{90, 80} {
		lib := fakeGPU(t, capability)
		defer func(f func(string, ...string) (*measure.Worker, error)) { startGPUWorker = f }(startGPUWorker)
		startGPUWorker = func(string, ...string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, "gpu")) }
		var out strings.Builder
		file := filepath.Join(t.TempDir(), "gpu.json")
		// A run that is cut off at the second shape has left the first.
		looked := false
		second := writer(func(line []byte) {
			if !strings.HasPrefix(string(line), "2 of 3: ") {
				return
			}
			looked = true
			if r, err := measure.Load(file); err != nil || r.Find("b4, 8 heads x 8192 x 64", ours, measure.Micros) == nil {
				t.Errorf("the first shape is not in the file: %v", err)
			}
		})
		b := &Bench{
			unchecked: true, Report: &measure.Report{Command: "gpu"}, Options: Options{Peers: true, json: file}, Stdout: &out, Stderr: second, Rng: measuretest.Rand(t),
			always: []gpuCase{
				evenCase(tableNamed, EvenShape(4, 8, 8, 8192, 64)),
				{table: tableRagged, shape: Shape{name: "R", heads: 8, kvHeads: 8, dim: 64, lengths: []int{30000, 17}}, pages: []int{64}, ragged: measure.AtMost(1)},
				{table: tableGroups, shape: EvenShape(4, 4, 4, 16384, 64), groups: []int{2}, grouped: measure.AtMost(1.03)},
			},
		}
		if err := b.run(t.Context()); err != nil || !looked {
			t.Fatal(err, looked)
		}
		if err := b.save(); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"GPU 0: ", "CUDA 12.4", "Fake 1.0", "### " + tableNamed, "### " + tableRagged, "### " + tableGroups, "### " + tableAll, "Bars met: ",
			"\n- b4, 8 heads x 8192 x 64, and perhaps others: without cudnn: too old",
			"0 of the ", "| b4, 8 heads x 8192 x 64 | ",
		} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("the output does not say %q:\n%s", want, out.String())
			}
		}
		is := "b4, 8 heads x 8192 x 64"
		f := b.Report.Find(is, ours, measure.Micros)
		// The driver says that 1.5 ms are between any two events.
		if launches := b.always[0].shape.Launches(); f == nil || !measuretest.Near(f.Value, 1500/float64(launches)) {
			t.Errorf("a launch takes %+v", f)
		}
		for who, there := range map[string]bool{ours: true, pageName(16): true, pageName(64): true, peerNames["flash"]: true, peerNames["cudnn"]: false} {
			if (b.Report.Find(is, who, measure.Micros) != nil) != there {
				t.Errorf("%s: measured %t", who, !there)
			}
		}
		if share := b.Report.Find(is, ours, measure.GPUShare); (share != nil) != (capability == 90) {
			t.Errorf("compute capability %d: of the ceiling %+v", capability, share)
		}
		for _, kernel := range []string{"read_ceiling", "read_pages"} {
			if ran := strings.Contains(lib.Log(), "kernel "+kernel); ran != (capability == 90) {
				t.Errorf("compute capability %d: %s ran: %t", capability, kernel, ran)
			}
		}
		for _, c := range b.always {
			is := c.shape.String()
			for _, n := range []int{16, 64} {
				there := capability == 90 && slices.Contains(c.pages, n)
				if (b.Report.Find(is, readerName(n), measure.Speed) != nil) != there {
					t.Errorf("compute capability %d: %s of %s: measured %t", capability, readerName(n), is, !there)
				}
				// The driver says that all take the same time.
				if f := b.Report.Find(is, pageName(n), measure.OfReader); (f != nil) != there || there && !measuretest.Near(f.Value, 1) {
					t.Errorf("compute capability %d: %s of %s: of its reader %+v", capability, pageName(n), is, f)
				}
			}
		}
		var back measure.Report
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, &back); err != nil || len(back.Figures) != len(b.Report.Figures) || len(back.Notes) < 4 {
			t.Errorf("JSON of %d figures (%v), want %d; notes %q", len(back.Figures), err, len(b.Report.Figures), back.Notes)
		}
	}
}

type writer func(p []byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

// TestFakePrompts goes through the whole command with -prefill.
func TestFakePrompts(t *testing.T) {
	lib := fakeGPU(t, 90)
	defer func(f func(string, ...string) (*measure.Worker, error)) { startGPUWorker = f }(startGPUWorker)
	startGPUWorker = func(string, ...string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, "gpu")) }
	prompt := prefillCase{table: tablePrompts, shape: EvenShape(2, 8, 4, 2048, 64), queries: []int{2048, 2048}, causal: true, flash: measure.AtLeast(1.3), pages: map[int]*measure.Bar{16: measure.AtLeast(0.9)}}
	mixed := prefillCase{table: tableMixed, shape: EvenShape(3, 8, 4, 2048, 64), queries: []int{512, 1, 1}, causal: true}
	var out strings.Builder
	b := &Bench{unchecked: true, Report: &measure.Report{}, Options: Options{Peers: true, prefill: true}, Stdout: &out, Stderr: io.Discard, Rng: measuretest.Rand(t), prefill: []prefillCase{prompt, mixed}}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"### " + tablePrompts, "### " + tableMixed, "Bars met: ", "2 x 2048, 8/4 heads of 64, causal, and perhaps others: without cudnn: too old", "| 512 and 2 x 1 of 2048, 8/4 heads of 64, causal | "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output does not say %q:\n%s", want, out.String())
		}
	}
	for is, names := range map[string][]string{prompt.String(): {ours, float32Name, pageName(16), peerNames["flash"]}, mixed.String(): {ours, float32Name, chunkName, singlesName}} {
		for _, name := range names {
			if b.Report.Find(is, name, measure.Micros) == nil {
				t.Errorf("%s: no %s", is, name)
			}
		}
	}
	// The driver says that 1.5 ms are between any two events.
	is, seconds := prompt.String(), 1.5e-3/float64(prompt.launches())
	if f := b.Report.Find(is, ours, measure.TFLOPs); f == nil || !measuretest.Near(f.Value, prompt.flops()/seconds/1e12) {
		t.Errorf("TFLOP/s: %+v", f)
	}
	// A fake peer takes a millisecond.
	if f := b.Report.Find(is, ours, measure.OverFlash); f == nil || !measuretest.Near(f.Value, 1e-3/seconds) || f.Bar == nil {
		t.Errorf("of FLASH: %+v", f)
	}
	if f := b.Report.Find(mixed.String(), ours, measure.OfSum); f == nil || f.Bar == nil {
		t.Errorf("of the allowed time: %+v", f)
	}
	for _, kernel := range []string{"prefill_f16_64", "lean_f16_64"} {
		if !strings.Contains(lib.Log(), "kernel "+kernel) {
			t.Errorf("%s did not run", kernel)
		}
	}
	// Kernels that do nothing are found out.
	b = &Bench{Report: &measure.Report{}, Options: Options{prefill: true}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t), prefill: []prefillCase{prompt}}
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "is NaN; it should be") {
		t.Errorf("error %v", err)
	}
	b.Options.match = regexp.MustCompile("no shape")
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "no such shape") {
		t.Errorf("error %v", err)
	}
}

// TestFakeLinear goes through the whole command with -linear.
func TestFakeLinear(t *testing.T) {
	lib := fakeGPU(t, 90)
	defer func(f func(string, ...string) (*measure.Worker, error)) { startGPUWorker = f }(startGPUWorker)
	startGPUWorker = func(string, ...string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, "gpu")) }
	c := linearCase{rows: 512, in: 256, out: 128, rounded: measure.AtLeast(0.8), precise: measure.AtLeast(0.4)}
	var out strings.Builder
	b := &Bench{unchecked: true, Report: &measure.Report{}, Options: Options{Peers: true, linear: true}, Stdout: &out, Stderr: io.Discard, Rng: measuretest.Rand(t), linear: []linearCase{c}}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"### " + tableLinear, "Bars met: ", "| 512 x 256 to 128 | lean | "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output does not say %q:\n%s", want, out.String())
		}
	}
	// The driver says that 1.5 ms are between any two events, and a fake peer takes a millisecond.
	seconds := 1.5e-3 / linearLayers
	for _, name := range []string{ours, roundedName} {
		if f := b.Report.Find(c.String(), name, measure.TFLOPs); f == nil || !measuretest.Near(f.Value, c.flops()/seconds/1e12) {
			t.Errorf("%s: TFLOP/s: %+v", name, f)
		}
		if f := b.Report.Find(c.String(), name, measure.OverCuBLAS); f == nil || !measuretest.Near(f.Value, 1e-3/seconds) || f.Bar == nil {
			t.Errorf("%s: of cuBLAS: %+v", name, f)
		}
	}
	if !strings.Contains(lib.Log(), "kernel matrix_operands_f16") {
		t.Error("no operands were made")
	}
	if strings.Contains(lib.Log(), "kernel batch_") {
		t.Error("a batch's kernel")
	}
	// A batch's rows are one launch, which makes operands itself.
	few := linearCase{rows: 32, in: 256, out: 128}
	b = &Bench{unchecked: true, Report: &measure.Report{}, Options: Options{linear: true}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t), linear: []linearCase{few}}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, kernel := range []string{"batch_f16_32\n", "batch_f16_32_rounded\n"} {
		if !strings.Contains(lib.Log(), "kernel "+kernel) {
			t.Errorf("no launch of %s:\n%s", kernel, lib.Log())
		}
	}
	// Kernels that do nothing are found out.
	b = &Bench{Report: &measure.Report{}, Options: Options{linear: true}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t), linear: []linearCase{c}}
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "is NaN; it should be") {
		t.Errorf("error %v", err)
	}
	b.Options.match = regexp.MustCompile("no shape")
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "no such shape") {
		t.Errorf("error %v", err)
	}
}

// TestFakeInterrupted: who interrupts keeps what was measured, the shape at hand
// too, and is told that it is not all.
func TestFakeInterrupted(t *testing.T) {
	fakeGPU(t, 90)
	var out strings.Builder
	b := &Bench{unchecked: true, Report: &measure.Report{}, Stdout: &out, Stderr: io.Discard, Rng: measuretest.Rand(t)}
	for _, keys := range []int{1024, 2048, 4096} {
		b.always = append(b.always, evenCase(tableNamed, EvenShape(4, 8, 8, keys, 64)))
	}
	b.Options.match = regexp.MustCompile("no shape")
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "no such shape") {
		t.Errorf("error %v", err)
	}
	b.Options.match = regexp.MustCompile("^b4, 8 heads x [124].* x 64")
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	if err := b.run(ctx); err == nil || !strings.Contains(err.Error(), "interrupted: 1 of 3 shapes") {
		t.Errorf("error %v", err)
	}
	for i, c := range b.always {
		is := c.shape.String()
		if there := b.Report.Find(is, ours, measure.Micros) != nil; there != (i == 0) || there != strings.Contains(out.String(), "| "+is+" | ") {
			t.Errorf("%s: measured %t, output:\n%s", is, there, out.String())
		}
	}
}

// TestFakeCeiling: both ceilings read every byte that a launch of attention
// would, of all sets in turn.
func TestFakeCeiling(t *testing.T) {
	lib := fakeGPU(t, 90)
	d := openFake(t)
	s := EvenShape(1, 4, 4, 32768, 128)
	if err := d.Fill(int64(s.Sets())*s.Region(), 1<<20); err != nil {
		t.Fatal(err)
	}
	lib.Forget()
	all, err := d.Ceilings(s)
	if err != nil || len(all) != 2 {
		t.Fatalf("%d ceilings (%v)", len(all), err)
	}
	log := lib.Log()
	for _, want := range []string{"grid 4 1 1 block 32 1 1 shared 99328", "grid 4 1 1 block 32 1 1 shared 99328"} {
		if n := strings.Count(log, want); n != 2*s.Launches() {
			t.Errorf("%d launches of %q, want %d", n, want, 2*s.Launches())
		}
	}
	var args []string
	for line := range strings.Lines(log) {
		if rest, ok := strings.CutPrefix(line, "args "); ok {
			args = append(args, rest[:16]) // where from
		}
	}
	slices.Sort(args)
	if n := len(slices.Compact(args)); n != s.Sets() {
		t.Errorf("%d sets, want %d", n, s.Sets())
	}
	if err := CloseAll(all); err != nil {
		t.Error(err)
	}
}

// TestFakeReader: a kernel that reads nothing is found out, nothing is left of a reader
// that fails, and blocks have what the kernel has room for, whatever the pages.
func TestFakeReader(t *testing.T) {
	lib := fakeGPU(t, 90)
	d := openFake(t)
	s := EvenShape(1, 8, 2, 1<<16, 64)
	if err := d.Fill(int64(s.Sets())*s.Region(), ArenaPeriod); err != nil {
		t.Fatal(err)
	}
	p := layOut(s, 16, d.rng)
	c, err := d.reader("R", &p)
	if err == nil || !strings.Contains(err.Error(), "R: the words that warp ") {
		t.Errorf("error %v", err)
	}
	if err := c.close(); err != nil {
		t.Error(err)
	}
	live := lib.Live()
	for _, call := range []string{"cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuGraphInstantiateWithFlags"} {
		lib.State().FailIn(call, 2)
		if c, err := d.reader("R", &p); c != nil || err == nil || lib.State().Failed() != call || lib.Live() != live {
			t.Errorf("%s failed: %v, %v, %d objects more", call, c, err, lib.Live()-live)
		}
		lib.State().FailIn("", 0)
	}
	for _, page := range []int{16, 64} {
		for _, dim := range []int{64, 128} {
			p := layOut(EvenShape(1, 1, 1, 128, dim), page, d.rng)
			r, err := d.newPageReader(&p)
			if err != nil {
				t.Fatal(err)
			}
			q := &r.params
			if q.slots < 1 || q.slots > 4 || r.grid.Shared != 128<<10 || int32(r.grid.Shared) != readerWarps*q.slots*q.together*q.piece {
				t.Errorf("pages of %d, heads of %d: %+v in %d bytes", page, dim, q, r.grid.Shared)
			}
			if err := r.close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestFakeFailures: whatever the driver refuses, the command ends with an error
// and nothing is left.
func TestFakeFailures(t *testing.T) {
	for _, call := range []string{"cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate", "cuModuleLoadData", "cuGraphInstantiateWithFlags", "cuStreamSynchronize"} {
		lib := fakeGPU(t, 90)
		lib.State().FailIn(call, 2)
		b := &Bench{unchecked: true, Report: &measure.Report{}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t),
			always: []gpuCase{evenCase(tableNamed, EvenShape(4, 8, 8, 8192, 64))}}
		if err := b.run(t.Context()); err == nil {
			t.Errorf("%s failed and nobody said so", call)
		}
		if lib.State().Failed() == "" {
			t.Errorf("%s was never called", call)
		}
	}
}

// TestFakeLayer: the floor is an append and an attention a layer, with a copy
// there, one back and a wait where neighbours are on the host.
func TestFakeLayer(t *testing.T) {
	lib := fakeGPU(t, 90)
	d := openFake(t)
	s := EvenShape(2, 4, 2, 128, 64)
	if err := d.Fill(layerCount*s.Region(), 1<<12); err != nil {
		t.Fatal(err)
	}
	f, err := d.layerFloor(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what              string
		run               func() error
		up, down, settles int
	}{{"there", f.there, 0, 0, 1}, {"here", f.here, layerCount, layerCount, layerCount}} {
		lib.Forget()
		if err := c.run(); err != nil {
			t.Fatal(err)
		}
		log := lib.Log()
		for what, want := range map[string]int{"kernel append_": layerCount, "kernel lean_": layerCount, "cuMemcpyHtoDAsync": c.up, "cuMemcpyDtoHAsync": c.down, "cuStreamSynchronize": c.settles} {
			if n := strings.Count(log, what); n != want {
				t.Errorf("%s: %d times %s, want %d", c.what, n, what, want)
			}
		}
	}
	layers := make(map[string]bool)
	for line := range strings.Lines(lib.Log()) {
		if rest, ok := strings.CutPrefix(line, "args "); ok && len(rest) > 64 {
			layers[rest[32:48]] = true // where its keys are
		}
	}
	if len(layers) != layerCount {
		t.Errorf("%d layers have keys of their own", len(layers))
	}
	if t40, err := f.kernels(40); err != nil || t40.Milliseconds() != 60 {
		t.Errorf("40 replays take %v (%v), want 40 times 1.5 ms", t40, err)
	}
	if err := f.close(); err != nil {
		t.Error(err)
	}
}
