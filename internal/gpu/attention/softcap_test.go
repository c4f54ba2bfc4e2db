//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// capPolynomial returns the numbers of a function of a kernel's source: the bound below which it computes a soft cap by a
// polynomial, and the coefficients, highest power first.
func capPolynomial(t *testing.T, file, function string) (bound float32, coefficients []float32) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "kernels", file))
	noError(t, err)
	_, body, found := strings.Cut(string(text), function+"(")
	body, _, ended := strings.Cut(body, "\n}\n")
	limit := regexp.MustCompile(`< (0\.\d+)f\)`).FindStringSubmatch(body)
	if !found || !ended || limit == nil {
		t.Fatalf("%s has no %s with a bound", file, function)
	}
	number := func(s string) float32 {
		x, err := strconv.ParseFloat(s, 32)
		noError(t, err)
		return float32(x)
	}
	for _, m := range regexp.MustCompile(`-?0\.\d{8,}f`).FindAllString(body, -1) {
		coefficients = append(coefficients, number(strings.TrimSuffix(m, "f")))
	}
	return number(limit[1]), coefficients
}

// The polynomials of soft caps, computed in float32 as in the kernels, are tanh to 2^-22 of it, up to their bounds: whatever the factor of a
// product, and whatever the cap. That is a 16th of what rounding a weight to float16 takes up to caps of 400, and less for bfloat16.
func TestSoftCapPolynomials(t *testing.T) {
	fma := func(a, b, c float32) float32 { return float32(math.FMA(float64(a), float64(b), float64(c))) }
	long, all := capPolynomial(t, "attn_variant.cuh", "void capScores")
	short, few := capPolynomial(t, "attn_prefill_variant.cuh", "bool capProducts")
	if long != 0.65 || len(all) != 5 || short != 0.3 || len(few) != 6 {
		t.Fatalf("capScores up to %v by %v, capProducts up to %v by %v", long, all, short, few)
	}
	rng := reftest.Rand(t)
	for range 20 {
		limit := float32(math.Exp2(40*rng.Float64() - 20)) // the cap
		reciprocal, by := 1/limit, float32(math.Exp2(160*rng.Float64()-80))
		var worst [2]float64
		for range 20000 {
			of := float64(limit) * math.Exp2(-12*rng.Float64()*rng.Float64()) // more of them near the bounds
			x := float32(of) * long
			if u := x * reciprocal; u < long {
				z := u * u
				f := all[0]
				for _, c := range all[1:] {
					f = fma(f, z, c)
				}
				exact := float64(limit) * math.Tanh(float64(x)/float64(limit))
				worst[0] = max(worst[0], math.Abs(float64(fma(x*z, f, x))-exact)/exact)
			}
			product := float32(of / float64(by) * float64(short))
			scaled := by * reciprocal
			if math.Abs(float64(product*scaled)) < float64(short) {
				w := product * scaled
				z := w * w
				// few has each coefficient twice, for the lane's two rows: a, b and c of the source.
				got := product * fma(fma(fma(few[4]*by, z, few[2]*by), z, few[0]*by), z, by)
				exact := float64(limit) * math.Tanh(float64(by)*float64(product)/float64(limit))
				worst[1] = max(worst[1], math.Abs(float64(got)-exact)/exact)
			}
		}
		if math.Max(worst[0], worst[1]) > 0x1p-22 || worst[0] == 0 || worst[1] == 0 {
			t.Errorf("cap %v, factor %v: errors of %v of 2^-24 by capScores and %v by capProducts", limit, by, worst[0]*0x1p24, worst[1]*0x1p24)
		}
	}
}

// testSoftCap runs prompts of one key: a row's log-sum-exp is the row's only score behind the soft cap. Scores are 2^-10 to 2^5 of the
// cap, in order, so that warps have small scores alone, large scores alone, and both.
func testSoftCap(t *testing.T, m *machine, n int) {
	m.engine.choice = takePrefill
	defer func() { m.engine.choice = takeFastest }()
	rng := reftest.Rand(t)
	plan, taken := m.engine.NewPlan(), 0
	for i := range n {
		shape := reftest.Shape{Heads: 8, KVHeads: 1, Dim: []int{64, 128}[i/2%2], Queries: []int{64}, Keys: []int{1}}
		shape.ValueDim = shape.Dim
		shape.SoftCap = enginetest.Pick(rng, 30, 50, 1e3, 1e4, 1e6)
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: []attn.DType{attn.Float16, attn.BFloat16}[i%2], dense: true})
		for _, x := range []gpu.Memory{p.q, p.k, p.v} {
			noError(t, x.Buffer.Close())
		}
		p.seqs, p.geometry.Scale, p.Scale = nil, shape.SoftCap, shape.SoftCap
		clear(p.K)
		clear(p.Q)
		p.Key(0, 0, 0)[3] = 1
		scores := make([]float64, 0, 512)
		for pos := range shape.Queries[0] {
			for h := range shape.Heads {
				x := math.Exp2(float64(pos*8+h)/512*15 - 10)
				x = float64(math.Float32frombits(math.Float32bits(float32(x)) &^ 0xffff)) // a bfloat16
				if rng.IntN(3) == 0 {
					x = -x
				}
				p.Query(0, pos, h)[3] = x
				scores = append(scores, x)
			}
		}
		p.layDense(m, t)
		m.run(t, plan, p)
		if plan.kernelOf(p.operands(), false).parts > 0 {
			taken++
		}
		lse := enginetest.Read(t, &p.lse)
		for pos := range shape.Queries[0] {
			for h := range shape.Heads {
				s := scores[pos*8+h]
				want := shape.SoftCap * math.Tanh(s)
				got := enginetest.Get(lse, pos*p.geometry.LSE.Row+h*p.geometry.LSE.Head, attn.Float32)
				if !(math.Abs(got-want) <= 0x1p-21*math.Abs(want)+0x1p-20) { // the sum of weights is 1 to 2^-20
					t.Errorf("%v: cap %v of score %v of the cap: %v, want %v (%.1f of 2^-24)", p, shape.SoftCap, s, got, want, math.Abs(got/want-1)*0x1p24)
				}
			}
		}
		p.close(t)
		if t.Failed() {
			t.Fatalf("case %d", i)
		}
	}
	if taken != n {
		t.Errorf("%d of %d problems by prefill kernels", taken, n)
	}
	noError(t, plan.Close())
}

func TestGPUSoftCap(t *testing.T)      { testSoftCap(t, realGPU(t), 40) }
func TestEmulatedSoftCap(t *testing.T) { testSoftCap(t, emulatedGPU(t, 5), 4) }
