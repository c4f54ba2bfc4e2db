package gpu

import (
	"errors"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/kernels"
)

// copiesUnit is the module with the kernel that makes small copies.
const copiesUnit = "copies"

// PutOffCopies has a stream put off small copies, which a kernel then makes together,
// where there is one for the GPU: see [cuda.Stream.PutOff].
func PutOffCopies(s *cuda.Stream) error {
	err := s.PutOff(func(dev *cuda.Device) (*cuda.Function, error) {
		m, err := Module(dev, copiesUnit)
		if err != nil {
			return nil, err
		}
		return m.Function("copy_pieces")
	})
	if errors.Is(err, kernels.ErrNoImage) {
		return nil
	}
	return err
}
