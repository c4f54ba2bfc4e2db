package attn

import "fmt"

// Activation is the function of one variable that a linear layer ends with. GPUs have the same numbers
// (kernels/gemm_activation.cuh).
type Activation uint8

const (
	NoActivation Activation = iota // f(v) = v
	ReLU                           // f(v) = max(v, 0)
	GELU                           // f(v) = v/2 (1 + erf(v/sqrt(2)))
	Activations  = iota            // how many there are
)

// String returns the name of a.
func (a Activation) String() string {
	if a >= Activations {
		return fmt.Sprintf("Activation(%d)", uint8(a))
	}
	return [...]string{"none", "relu", "gelu"}[a]
}
