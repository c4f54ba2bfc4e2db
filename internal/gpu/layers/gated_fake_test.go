//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/kernels"
)

// gatedArguments tells a driver how large the kernels' arguments are.
func gatedArguments(s *fakedriver.State) {
	s.Argument("gated_linear_", int(unsafe.Sizeof(linearParams{})))
	s.Argument("gated_batch_", int(unsafe.Sizeof(skinnyParams{})))
	s.Argument(gatedPrefix, int(unsafe.Sizeof(gemmParams{})))
	s.Argument("node_elements", int(unsafe.Sizeof(elementsParams{})))
}

// Gated units and activations that the other kernels don't know are as many launches as other layers, by
// kernels of their own; where there are none of these, what they do is launches more.
func TestGatedLaunches(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, lib, d := fakeDecoder(t, f.Capability, max(f.SMs, 8), f.Shared)
			d.leastHopper = math.MaxInt
			gatedArguments(lib.State())
			rng := rand.New(rand.NewPCG(8, uint64(f.Capability)))
			if d.gated != nil {
				t.Error("the kernels are loaded before anybody needs them")
			}
			kinds := map[string]bool{}
			for range 120 {
				rows, in, out := 1+rng.IntN(enginetest.Pick(rng, 4, 20, 150, 400)), 8*(1+rng.IntN(200)), 1+rng.IntN(700)
				gate := rng.IntN(3) > 0
				d.leftOut, d.slower = enginetest.Pick(rng, nil, []int{32, 64}), enginetest.Pick(rng, 1.0, 0)
				o := Linear{
					Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Gate: gate, RoundX: rng.IntN(2) == 0,
					Activation: enginetest.Pick(rng, attn.SiLU, attn.GELUTanh),
				}
				memory := []gpu.Memory{o.X}
				for i := range o.together() {
					p := LinearPart{W: m.memory(t, enginetest.Pick(rng, attn.Float16, attn.BFloat16), out*in), Out: out}
					if i > 0 {
						p.W = m.memory(t, o.Parts[0].W.DType, out*in)
					} else {
						p.Y = m.memory(t, attn.Float32, rows*out)
						memory = append(memory, p.Y)
					}
					o.Parts, memory = append(o.Parts, p), append(memory, p.W)
				}
				launches := func() []enginetest.Launch {
					scratch, err := d.Scratch(&o)
					noError(t, err)
					if o.Scratch = (gpu.Memory{}); scratch > 0 {
						o.Scratch = m.memory(t, attn.Float32, scratch)
						memory = append(memory, o.Scratch)
					}
					lib.Forget()
					noError(t, d.Linear(m.Stream, &o))
					return enginetest.Launches(lib.Log())
				}
				for _, l := range launches() {
					if strings.HasPrefix(l.Kernel, "matrix_operands_") {
						continue
					}
					if kinds[strings.Join(strings.Split(l.Kernel, "_")[:2], "_")] = true; !strings.HasPrefix(l.Kernel, gatedPrefix) {
						t.Fatalf("%d rows of %d: %s", rows, in, l.Kernel)
					}
					activation := int32(0)
					switch {
					case strings.HasPrefix(l.Kernel, "gated_linear_"):
						activation = (*linearParams)(unsafe.Pointer(&l.Arg[0])).activation
					case strings.HasPrefix(l.Kernel, "gated_batch_"):
						activation = (*skinnyParams)(unsafe.Pointer(&l.Arg[0])).activation
					default:
						activation = (*gemmParams)(unsafe.Pointer(&l.Arg[0])).activation
					}
					if activation != o.activation() || (activation&gateFlag != 0) != gate {
						t.Fatalf("%s: activation %d", l.Kernel, activation)
					}
				}
				d.separateGates = true
				list := launches()
				if last := list[len(list)-1].Kernel; last != "node_elements" || slices.ContainsFunc(list, func(l enginetest.Launch) bool { return strings.HasPrefix(l.Kernel, gatedPrefix) }) {
					t.Fatalf("apart: %s", lib.Log())
				}
				d.separateGates = false
				for _, x := range memory {
					noError(t, x.Buffer.Close())
				}
			}
			if want := map[int]int{90: 5}[f.Capability]; len(kinds) < want {
				t.Errorf("only %v", kinds)
			}
		})
	}
}

// Without images for a GPU the gates are launches of their own; what else fails is an error, and is tried again.
func TestGatesWithoutImages(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	gatedArguments(lib.State())
	fail := fmt.Errorf("unit %q: %w", gatedUnit, kernels.ErrNoImage)
	defer func(real func(string, int) ([]byte, error)) { gpu.Image = real }(gpu.Image)
	gpu.Image = func(unit string, _ int) ([]byte, error) {
		if unit == gatedUnit {
			return nil, fail
		}
		return []byte("image"), nil
	}
	const rows, in, out = 2, 64, 30
	o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Gate: true, Activation: attn.SiLU, Parts: []LinearPart{
		{W: m.memory(t, attn.Float16, in*out), Y: m.memory(t, attn.Float32, rows*out), Out: out}, {W: m.memory(t, attn.Float16, in*out), Out: out},
	}}
	scratch, err := d.Scratch(&o)
	if want := 2 * attn.Ceil(rows*out, 4) * 4; scratch != want || err != nil {
		t.Fatalf("a scratch of %d elements, want %d: %v", scratch, want, err)
	}
	wantError(t, "no scratch", d.Linear(m.Stream, &o), attn.ErrShape, "the scratch has no buffer")
	o.Scratch = m.memory(t, attn.Float32, scratch)
	lib.Forget()
	noError(t, d.Linear(m.Stream, &o))
	list := enginetest.Launches(lib.Log())
	if len(list) != 2 || list[0].Kernel != "linear_f16" || list[1].Kernel != "node_elements" {
		t.Fatal(lib.Log())
	}
	p, e := (*linearParams)(unsafe.Pointer(&list[0].Arg[0])), (*elementsParams)(unsafe.Pointer(&list[1].Arg[0]))
	if p.activation != 0 || p.y[0] != o.Scratch.Address() || e.x != p.y[0] || e.times != p.y[1] || e.y != o.Parts[0].Y.Address() || e.activation != int32(attn.SiLU) || e.n != rows*out {
		t.Errorf("%+v, %+v", *p, *e)
	}
	fail = fmt.Errorf("another error")
	if err := d.Linear(m.Stream, &o); err == nil || !strings.Contains(err.Error(), "another error") {
		t.Errorf("another error: %v", err)
	}
	for _, x := range []gpu.Memory{o.X, o.Scratch, o.Parts[0].W, o.Parts[0].Y, o.Parts[1].W} {
		noError(t, x.Buffer.Close())
	}
}

// What is no gated unit is refused before anything is written.
func TestGatesRefuse(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	const rows, in, out = 2, 64, 30
	good := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in), Gate: true, Activation: attn.SiLU}
	part := LinearPart{W: m.memory(t, attn.Float16, in*out), Y: m.memory(t, attn.Float32, rows*out), Out: out}
	bias := m.memory(t, attn.Float32, out+3)
	for name, with := range map[string]func(o *Linear){
		"one part":      func(o *Linear) { o.Parts = o.Parts[:1] },
		"three parts":   func(o *Linear) { o.Parts = append(o.Parts, part) },
		"two widths":    func(o *Linear) { o.Parts[1].Out-- },
		"no activation": func(o *Linear) { o.Activation = attn.NoActivation },
		"a crooked bias": func(o *Linear) {
			o.Parts[1].Out, o.Parts[0].Out, o.Parts[1].B = 28, 28, gpu.Memory{Buffer: bias.Buffer, Offset: 4, DType: attn.Float32, Len: 28}
		},
		"a bias of no type": func(o *Linear) { o.Parts[1].B = gpu.Memory{Buffer: bias.Buffer, DType: attn.Float16, Len: out} },
	} {
		o := good
		o.Parts = []LinearPart{part, part}
		with(&o)
		lib.Forget()
		if err := d.Linear(m.Stream, &o); err == nil || len(enginetest.Launches(lib.Log())) > 0 {
			t.Errorf("%s: %v, %s", name, err, lib.Log())
		}
	}
	for _, x := range []gpu.Memory{good.X, part.W, part.Y, bias} {
		noError(t, x.Buffer.Close())
	}
}
