package attn

import "fmt"

// Activation is a function of one variable: that which a linear layer ends with, or the gate of a gated linear
// unit. GPUs have the same numbers (kernels/gemm_activation.cuh, nodes.cuh).
type Activation uint8

const (
	NoActivation Activation = iota // f(v) = v
	ReLU                           // f(v) = max(v, 0)
	GELU                           // f(v) = v/2 (1 + erf(v/sqrt(2)))
	GELUTanh                       // f(v) = v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
	SiLU                           // f(v) = v / (1 + exp(-v))
	Activations  = iota            // how many there are
)

// String returns the name of a.
func (a Activation) String() string {
	if a >= Activations {
		return fmt.Sprintf("Activation(%d)", uint8(a))
	}
	return [...]string{"none", "relu", "gelu", "gelu tanh", "silu"}[a]
}
